"""An agent indexes this project's documents, is killed half way, and another process carries on.

Rules of this file:

- The agent is real LangGraph: a chat model that calls tools, two at a time, in a loop. Only the model's wits are
  scripted, so that no key and no network is needed.
- All that passes from the killed process to the next is the store, a directory. What the tools did is also
  written to a log of their own, outside the store, so that doing something twice would show.
- The kill is SIGKILL, and comes at the same place each time: in the middle of a step, when one of its two tool
  calls is stored and the other hangs. The agent says through a pipe when it hangs; the parent looks into the
  store, from outside, until the other call is there.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolCall, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Send
from rich.console import Console
from rich.table import Table

from langgraph.checkpoint.lsm import LSMSaver

ROOT = Path(__file__).resolve().parent.parent
CONFIG: RunnableConfig = {"configurable": {"thread_id": "index the documents"}, "recursion_limit": 10_000}
TASK = "Index every document: count its words, find its headings and links, and write a note about each."
QUESTION = "Stop here. Which of the documents that you have read so far is the longest?"
PATIENCE = 60.0  # seconds to wait for the agent before the demo calls itself broken


class Agent:
    """The graph, its model and its tools, on one store.

    Args:
        work: The folder of this demo: the store, the notes and the log of what the tools did.
        hang: The document on which reading hangs for good, or an empty string.
    """

    def __init__(self, saver: BaseCheckpointSaver[Any], work: Path, hang: str = ""):
        notes, log = work / "notes", work / "tools.log"
        notes.mkdir(exist_ok=True)

        def did(name: str, document: str = "") -> None:
            with log.open("a") as file:
                file.write(f"{name} {document}".strip() + "\n")

        @tool
        def list_documents() -> str:
            """The paths of all documents, one on each line."""
            did("list_documents")
            return "\n".join(documents())

        @tool
        def read_document(path: str) -> str:
            """The text of a document."""
            if path == hang:
                print(f"hanging {path}", flush=True)
                sys.stdin.read()  # nobody writes there: this ends when the parent does
                raise RuntimeError("the demo has ended without killing its agent")
            did("read_document", path)
            return (ROOT / path).read_text(encoding="utf-8")

        @tool
        def write_note(path: str, words: int, headings: list[str], links: list[str]) -> str:
            """Keep a note about a document."""
            did("write_note", path)
            note = notes / f"{path.replace('/', '--')}.json"
            note.write_text(json.dumps({"path": path, "words": words, "headings": headings, "links": links}))
            return f"noted {path}"

        tools = {t.name: t for t in (list_documents, read_document, write_note)}
        model = ScriptedModel()

        def think(state: MessagesState) -> dict[str, list[BaseMessage]]:
            return {"messages": [model.invoke(state["messages"])]}

        def act(call: ToolCall) -> dict[str, list[BaseMessage]]:
            return {"messages": [tools[call["name"]].invoke(call)]}

        def calls(state: MessagesState) -> list[Send]:
            answer = state["messages"][-1]
            return [Send("act", call) for call in answer.tool_calls] if isinstance(answer, AIMessage) else []

        builder = StateGraph(MessagesState)
        builder.add_node(think)
        builder.add_node("act", act)  # type: ignore[arg-type]
        builder.add_edge(START, "think")
        builder.add_conditional_edges("think", calls, ["act"])
        builder.add_edge("act", "think")
        self.graph = builder.compile(checkpointer=saver)

    def run(self) -> BaseMessage:
        """Begin, or carry on with what is left, and return the last answer."""
        begun = self.graph.get_state(CONFIG).values
        state = self.graph.invoke(None if begun else {"messages": [HumanMessage(TASK)]}, CONFIG, durability="sync")
        answer: BaseMessage = state["messages"][-1]
        return answer


class ScriptedModel(BaseChatModel):
    """In place of a paid model: it decides by rules, from nothing but the messages."""

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        done = {name: self._done(messages, name) for name in ("list_documents", "read_document", "write_note")}
        if isinstance(messages[-1], HumanMessage) and messages[-1].content == QUESTION:
            longest = max(done["read_document"], key=lambda path: len(done["read_document"][path].split()))
            return self._say(f"Of the {len(done['read_document'])} that I have read: {longest}.")
        if not done["list_documents"]:
            return self._call([("list_documents", {})])
        unread = [path for path in done["list_documents"][""].splitlines() if path not in done["read_document"]]
        unnoted = [path for path in done["read_document"] if path not in done["write_note"]]
        if unnoted:
            return self._call([("write_note", self._note(path, done["read_document"][path])) for path in unnoted])
        if unread:
            return self._call([("read_document", {"path": path}) for path in unread[:2]])
        return self._say(f"All {len(done['write_note'])} documents have a note.")

    @staticmethod
    def _done(messages: list[BaseMessage], name: str) -> dict[str, str]:
        """What a tool answered, by the document that it was called for."""
        calls = {c["id"]: c for m in messages if isinstance(m, AIMessage) for c in m.tool_calls if c["name"] == name}
        answers = [m for m in messages if isinstance(m, ToolMessage) and m.tool_call_id in calls]
        return {calls[m.tool_call_id]["args"].get("path", ""): str(m.content) for m in answers}

    @staticmethod
    def _note(path: str, text: str) -> dict[str, Any]:
        return {
            "path": path,
            "words": len(text.split()),
            "headings": re.findall(r"^#+ +(.+)$", text, re.MULTILINE),
            "links": re.findall(r"\]\(([^)\s]+)\)", text),
        }

    @staticmethod
    def _call(wanted: list[tuple[str, dict[str, Any]]]) -> ChatResult:
        calls = [ToolCall(name=name, args=args, id=f"{name}:{args.get('path', '')}") for name, args in wanted]
        return ChatResult(generations=[ChatGeneration(message=AIMessage("", tool_calls=calls))])

    @staticmethod
    def _say(text: str) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=AIMessage(text))])


def documents() -> list[str]:
    """The documents of this project, relative to its root."""
    found = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path.relative_to(ROOT).as_posix() for path in found if path.is_file()]


def open_saver(work: Path) -> LSMSaver:
    """The checkpoints of the demo: a directory."""
    return LSMSaver.from_conn_string((work / "store").as_uri())


def agent_process(work: Path, hang: str = "") -> subprocess.Popen[str]:
    """Run the agent in a process of its own, its output in a pipe."""
    command = [sys.executable, __file__, "--agent", str(work), "--hang", hang]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def kill_half_way(work: Path, hang: str) -> None:
    """Start the agent, and kill it when it hangs on `hang` and the tool call beside that one is stored."""
    with agent_process(work, hang) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            check(said == f"hanging {hang}\n", f"the agent should hang on {hang}, and said {said!r}")
            with open_saver(work) as saver:
                deadline = time.monotonic() + PATIENCE
                while not stored_calls(saver):
                    check(time.monotonic() < deadline, "the tool call beside the one that hangs is never stored")
                    time.sleep(0.01)
        finally:
            process.kill()
    check(process.returncode == -signal.SIGKILL, f"the killed process ended with exit code {process.returncode}")


def stored_calls(saver: LSMSaver) -> int:
    """How many tool calls of the unfinished step are stored."""
    found = saver.get_tuple(CONFIG)
    return sum(channel == "messages" for _, channel, _ in found.pending_writes or ()) if found else 0


def check(holds: bool, claim: str) -> None:
    """End the demo with exit code 1 where something is not as it must be."""
    if not holds:
        raise SystemExit(f"demo: this should not happen: {claim}")


def demo(work: Path, console: Console, last: int) -> None:
    """The whole story, printed as it happens."""
    paths = documents()
    # Two documents are read at a time; the one that hangs is the second of the pair in the middle.
    hang = paths[len(paths) // 4 * 2 + 1]
    log = work / "tools.log"

    console.rule("[bold]1. An agent works through the documents, and is killed")
    kill_half_way(work, hang)
    before = log.read_text().splitlines()
    console.print(f"{len(paths)} documents. The agent has called {len(before)} tools, and hung while reading {hang}.")
    with open_saver(work) as saver:
        console.print(f"SIGKILL. Tool calls of the unfinished step in the store: {stored_calls(saver)} of 2.")

    console.rule("[bold]2. A new process carries on from the directory")
    with agent_process(work) as process:
        try:
            answer, _ = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
    check(process.returncode == 0, f"the second process ended with exit code {process.returncode}")
    after = log.read_text().splitlines()
    expected = ["list_documents", *(f"{name} {path}" for path in paths for name in ("read_document", "write_note"))]
    check(after[: len(before)] == before, "the log of the tools has changed its beginning")
    check(sorted(after) == sorted(expected), f"the tools should have been called once each, and the log says {after}")
    console.print(f'It called {len(after) - len(before)} tools, and says: "{answer.strip()}"')
    console.print(f"Tool calls in both processes: {len(after)}. Different ones: {len(set(after))}. Nothing done twice.")
    show_notes(work, console)

    with open_saver(work) as saver:
        agent = Agent(saver, work)
        console.rule("[bold]3. The history")
        show_history(agent, console, last)
        console.rule("[bold]4. Time travel: a fork from half way")
        fork(agent, console)
        console.rule("[bold]5. What lies on disk")
        whole = sum(len(saver.serde.dumps_typed(found.checkpoint)[1]) for found in saver.list(CONFIG))
    show_files(work / "store", whole, console)


def show_notes(work: Path, console: Console) -> None:
    """What the agent found out."""
    table = Table("document", "words", "headings", "links")
    for column in table.columns[1:]:
        column.justify = "right"
    for file in sorted((work / "notes").iterdir()):
        note = json.loads(file.read_text())
        table.add_row(note["path"], str(note["words"]), str(len(note["headings"])), str(len(note["links"])))
    console.print(table)


def show_history(agent: Agent, console: Console, last: int) -> None:
    """The last checkpoints, newest first."""
    table = Table("step", "checkpoint", "messages", "next", title=f"the last {last} checkpoints")
    for state in agent.graph.get_state_history(CONFIG, limit=last):
        step, messages = (state.metadata or {}).get("step"), state.values.get("messages", [])
        table.add_row(str(step), checkpoint_id(state.config), str(len(messages)), ", ".join(state.next) or "the end")
    console.print(table)


def fork(agent: Agent, console: Console) -> None:
    """Ask another question at a checkpoint half way; the thread's own end stays as it was."""
    end = agent.graph.get_state(CONFIG)
    history = agent.graph.get_state_history(CONFIG)
    # Where tools have just answered: the task, the list and its answer are three messages, so these know more.
    answered = [state for state in history if state.next == ("think",) and len(state.values["messages"]) > 3]
    start = answered[len(answered) // 2]
    config = agent.graph.update_state(start.config, {"messages": [HumanMessage(QUESTION)]}, as_node="act")
    answer = agent.graph.invoke(None, config)["messages"][-1]
    step = (start.metadata or {}).get("step")
    console.print(f"At step {step}, checkpoint {checkpoint_id(start.config)}, the agent is asked: {QUESTION}")
    console.print(f'It says: "{answer.content}"')
    check(agent.graph.get_state(end.config).values == end.values, "the fork has changed the end that it left")
    check(agent.graph.get_state(CONFIG).values["messages"][-1] == answer, "the fork is not the latest state")
    console.print(f"The end of the first branch, {checkpoint_id(end.config)}, is as it was.")


def show_files(store: Path, whole: int, console: Console) -> None:
    """Every file of the store, and their sum beside what the checkpoints hold."""
    table = Table("file", "bytes")
    table.columns[1].justify = "right"
    files = [path for path in sorted(store.rglob("*")) if path.is_file()]
    for path in files:
        table.add_row(path.relative_to(store).as_posix(), f"{path.stat().st_size:,}")
    console.print(table)
    size = sum(path.stat().st_size for path in files)
    console.print(f"Bytes on disk: {size:,}. All checkpoints written out whole: {whole:,}.")


def checkpoint_id(config: RunnableConfig) -> str:
    """The checkpoint that a config addresses."""
    return str(config["configurable"]["checkpoint_id"])


def main() -> None:
    """Run the demo; with `--agent`, be the process that it starts and kills."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--last", type=int, default=8, metavar="N", help="how many checkpoints to show")
    parser.add_argument("--agent", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--hang", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.agent:
        with open_saver(options.agent) as saver:
            print(Agent(saver, options.agent, options.hang).run().content)
        return
    with tempfile.TemporaryDirectory(prefix="langgraph-lsm-demo-") as work:
        demo(Path(work), Console(highlight=False, soft_wrap=True), options.last)


if __name__ == "__main__":
    main()
