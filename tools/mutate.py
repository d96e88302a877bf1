"""Change the engine's code, one small thing at a time, and see whether tests and the simulator notice.

`python tools/mutate.py --module lsm.lineage` runs every mutant of a module that has not been run yet: first a few
seeds of the simulator, then some quick test files, then the other seeds. Results are JSON lines, by default in
`build/mutants/<module>.jsonl`; a mutant of code that has not changed since is not run again. `--survivors` prints those
that nothing has noticed.

Rules of this module:

- A mutant is the module's syntax tree with one change, imported in the place of the module by a process of its own.
- It is killed where a test fails, the simulator reports a violation, or nothing ends in time.
- What cannot matter to behaviour is left alone: texts, types, logging, docstrings.
"""

from __future__ import annotations

import argparse
import ast
import copy
import hashlib
import importlib.abc
import importlib.util
import json
import logging
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "saver")]

TESTS = {
    "lsm.lineage": ["test_lineage", "test_delta"],
    "lsm.swap": ["test_hints", "test_foundations", "test_threads", "test_delta", "test_borrowed"],
    "lsm.collect": ["test_sweep", "test_foundations", "test_root", "test_trouble"],
    "lsm.flush": ["test_hints", "test_put_again", "test_budgets", "test_threads"],
    "lsm.commit": ["test_concurrency", "test_concurrent_runs", "test_put_again", "test_borrowed", "test_contention"],
    "lsm.rewrite": ["test_hints", "test_foundations", "test_borrowed", "test_threads", "test_delta", "test_verify"],
}
"""The test files that are run before the simulator, by module: those that are near it, and quick."""

_SWAPPED: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
_UNCHANGED = -1
_MOST_MEMORY = 2 << 30
_QUICK = 20
"""How many seeds are run before the tests: they notice most, in a second."""
_OTHER = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Change:
    """One change of a function.

    Attributes:
        what: In a few words.
        make: Carries it out on the node that it is of.
    """

    what: str
    make: Callable[[Any], Any]


def changes(node: ast.AST) -> Iterator[Change]:
    """What may be changed about a node."""
    if isinstance(node, ast.Compare):
        for at, each in enumerate(node.ops):
            if type(each) in _SWAPPED:
                other = _SWAPPED[type(each)]
                yield Change(f"{type(each).__name__} becomes {other.__name__}", _op_setter(at, other))
    elif isinstance(node, (ast.BoolOp, ast.BinOp, ast.AugAssign)) and type(node.op) in _SWAPPED:
        other = _SWAPPED[type(node.op)]
        yield Change(f"{type(node.op).__name__} becomes {other.__name__}", _setter("op", other))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield Change("not is left out", lambda node: node.operand)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        value = not node.value if isinstance(node.value, bool) else node.value + 1
        yield Change(f"{node.value} becomes {value}", lambda node: ast.Constant(value))
    elif isinstance(node, ast.Slice):
        for name in ("lower", "upper"):
            if getattr(node, name) is not None:
                yield Change(f"a slice has no {name} end", _setter(name, None))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _OTHER:
        name = _OTHER[node.func.id]
        yield Change(f"{node.func.id} becomes {name}", _setter("func", lambda: ast.Name(name, ast.Load())))
    elif isinstance(node, (ast.If, ast.While, ast.IfExp)):
        yield Change("the condition is negated", _negate)
    elif isinstance(node, ast.comprehension) and node.ifs:
        yield Change("nothing is left out", _setter("ifs", list))
    elif isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        yield Change("None is returned", _setter("value", lambda: ast.Constant(None)))
    elif isinstance(node, (ast.Expr, ast.Assign, ast.AugAssign, ast.Raise, ast.Continue, ast.Break)):
        yield Change("a statement is left out", lambda node: ast.Pass())


def _op_setter(at: int, other: type) -> Callable[[Any], Any]:
    def make(node: Any) -> Any:
        node.ops[at] = other()
        return node

    return make


def _setter(name: str, value: Callable[[], Any] | None) -> Callable[[Any], Any]:
    def make(node: Any) -> Any:
        setattr(node, name, value() if value is not None else None)
        return node

    return make


def _negate(node: Any) -> Any:
    node.test = ast.UnaryOp(ast.Not(), node.test)
    return node


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_quiet(node: ast.AST) -> bool:
    """Whether nothing within a node matters: a docstring, what is logged, a type, or a message."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return ast.unparse(node.value.func).startswith("logger.")
    return isinstance(node, (ast.JoinedStr, ast.arguments, ast.Assert))


def sites(tree: ast.Module) -> Iterator[tuple[str, ast.AST, Change]]:
    """All (function, node, change) of a module."""

    def within(node: ast.AST, name: str, runs: bool) -> Iterator[tuple[str, ast.AST, Change]]:
        for field, value in ast.iter_fields(node):
            if field in ("decorator_list", "returns", "annotation", "type_comment"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if not isinstance(child, ast.AST) or _is_quiet(child):
                    continue
                if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                    own = f"{name}.{child.name}".lstrip(".")
                    yield from within(child, own, runs or isinstance(child, ast.FunctionDef))
                    continue
                if runs:
                    for change in changes(child):
                        yield name, child, change
                yield from within(child, name, runs)

    return within(tree, "", False)


def mutated(source: str, number: int) -> ast.Module:
    """A module's syntax tree with one of its changes; with none, where the number is -1."""
    tree = ast.parse(source)
    if number < 0:
        return tree
    _, node, change = list(sites(tree))[number]
    made = change.make(copy.deepcopy(node))

    class Exchange(ast.NodeTransformer):
        def visit(self, at: ast.AST) -> Any:
            return made if at is node else super().visit(at)

    return ast.fix_missing_locations(Exchange().visit(tree))


# In the process of a mutant.


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports a mutant in the place of its module."""

    def __init__(self, module: str, path: Path, tree: ast.Module):
        self._module, self._path, self._tree = module, path, tree

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return importlib.util.spec_from_file_location(name, self._path, loader=self) if name == self._module else None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._tree, str(self._path), "exec"), vars(module))


def try_mutant(module: str, number: int, first: int, seeds: int) -> str | None:
    """What notices a mutant, or `None`. Nothing of the engine may have been imported yet."""
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, _MOST_MEMORY))  # endless loops may grow
    path = _path(module)
    sys.meta_path.insert(0, _Finder(module, path, mutated(path.read_text(), number)))
    chances = range(first, first + seeds)
    return _by_seeds(chances[:_QUICK]) or _by_tests(module) or _by_seeds(chances[_QUICK:])


def _by_tests(module: str) -> str | None:
    """What the tests near a module notice."""
    import pytest

    files = [str(ROOT / f"tests/{name}.py") for name in TESTS.get(module, []) if (ROOT / f"tests/{name}.py").exists()]
    options = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", "not s3 and not file"]
    options += ["--hypothesis-profile", "quick"]
    if files and (status := pytest.main([*options, *files])) != pytest.ExitCode.OK:
        return f"tests ({status!r})"
    return None


def _by_seeds(seeds: range) -> str | None:
    """What the simulator notices."""
    from tools.simulation.run import simulate
    from tools.simulation.scenario import make

    logging.getLogger("lsm").setLevel(logging.CRITICAL)
    for seed in seeds:
        if (failure := simulate(make(seed)).failure) is not None:
            return f"seed {seed}: {failure[:120]}"
    return None


# The runner.


def _path(module: str) -> Path:
    return ROOT / (module.replace(".", "/") + ".py")


@dataclass(frozen=True)
class Mutant:
    """One mutant of a module. Its key tells whether it has been run: it goes by the function's text, not by lines."""

    number: int
    function: str
    line: int
    what: str
    code: str
    key: str


def mutants(module: str) -> list[Mutant]:
    """All mutants of a module."""
    source = _path(module).read_text()
    found: list[Mutant] = []
    seen: dict[str, int] = {}
    tree = ast.parse(source)
    bodies = {id(node): ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.stmt)}
    lines = source.splitlines()
    for number, (function, node, change) in enumerate(sites(tree)):
        line = getattr(node, "lineno", 0) or getattr(getattr(node, "target", None), "lineno", 0)
        code = bodies.get(id(node)) or ast.unparse(node)
        told = f"{function}|{lines[line - 1].strip() if line else ''}|{code}|{change.what}"
        seen[told] = seen.get(told, 0) + 1
        key = hashlib.blake2b(f"{told}|{seen[told]}".encode(), digest_size=8).hexdigest()
        found.append(Mutant(number, function, line, change.what, code.splitlines()[0][:100], key))
    return found


def run(module: str, one: Mutant, arguments: argparse.Namespace) -> dict[str, Any]:
    """Try a mutant in a process of its own."""
    command = [sys.executable, __file__, "--module", module, "--try", str(one.number)]
    command += ["--first", str(arguments.first), "--seeds", str(arguments.seeds)]
    command += ["--timeout", str(arguments.timeout)]
    began = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=arguments.timeout * 10, check=False
        )
        by = done.stdout.rstrip().rsplit("\n", 1)[-1] if done.returncode == 1 else None
        if done.returncode not in (0, 1):
            by = f"ends with {done.returncode}: {done.stderr.strip()[-200:]}"
    except subprocess.TimeoutExpired:
        by = "does not end"
    result = {"key": one.key, "function": one.function, "line": one.line, "what": one.what, "code": one.code}
    return {**result, "killed_by": by, "seconds": round(time.monotonic() - began, 1), "seeds": arguments.seeds}


def main() -> int:
    """Parse the command line, and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--module", required=True, help="such as lsm.lineage")
    parser.add_argument("--function", default="", help="only functions whose name begins so")
    parser.add_argument("--seeds", type=int, default=300, help="of the simulator (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="mutants side by side (default: %(default)s)")
    parser.add_argument(
        "--timeout", type=int, default=60, help="of a mutant, in seconds of processor time (default: %(default)s)"
    )
    parser.add_argument("--results", type=Path, help="where results are kept")
    parser.add_argument("--again", action="store_true", help="run those again that have survived")
    parser.add_argument("--survivors", action="store_true", help="run nothing; print what has survived")
    parser.add_argument("--try", type=int, dest="number", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    module = arguments.module
    if arguments.number is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (arguments.timeout, arguments.timeout + 1))
        by = try_mutant(module, arguments.number, arguments.first, arguments.seeds)
        print(by)
        return int(by is not None)
    results: Path = arguments.results or ROOT / f"build/mutants/{module}.jsonl"
    results.parent.mkdir(parents=True, exist_ok=True)
    known = {}
    if results.exists():
        known = {each["key"]: each for line in results.read_text().splitlines() if (each := json.loads(line))}
    chosen = [one for one in mutants(module) if one.function.startswith(arguments.function)]
    left = [one for one in chosen if one.key not in known or (arguments.again and not known[one.key]["killed_by"])]
    if left and not arguments.survivors:
        unchanged = run(module, Mutant(_UNCHANGED, "", 0, "", "", ""), arguments)
        if unchanged["killed_by"] is not None:
            parser.error(f"{module} as it is does not pass: {unchanged['killed_by']}")
        with ThreadPoolExecutor(arguments.jobs) as pool, results.open("a") as file:
            for future in as_completed([pool.submit(run, module, one, arguments) for one in left]):
                result = future.result()
                known[result["key"]] = result
                print(json.dumps(result), file=file, flush=True)
    _report(module, chosen, known)
    return 0


def _report(module: str, chosen: Sequence[Mutant], known: dict[str, Any]) -> None:
    survived = [one for one in chosen if one.key in known and known[one.key]["killed_by"] is None]
    for one in survived:
        print(f"{module}:{one.line} {one.function}: {one.what}: {one.code}")
    tried = sum(one.key in known for one in chosen)
    print(f"{module}: {len(chosen)} mutants, {tried} tried, {tried - len(survived)} killed, {len(survived)} survived")


if __name__ == "__main__":
    sys.exit(main())
