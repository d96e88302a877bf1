"""Messages of a chat, made up from a list of words, the same in every process.

Rules of this module: no clock, no global random state; message `n` is always the same message.
"""

from __future__ import annotations

import base64
import random
import uuid

from langchain_core.messages import AIMessage, AnyMessage, HumanMessage

WORDS_PER_MESSAGE = 60

_WORDS = """
a about after again agent all also an and another answer any are as ask at back be because been before but by call can
case change check city client code come could customer data date day delay deliver detail did different do does done
down each early email even every example explain file find first flight follow for found from full get give go good had
has have he help her here him his hotel hour how however if in information into invoice is issue it its just keep know
large last late later let like line list little long look made mail make many may me meeting message might minute model
more most move much must my name need never new next no not note now number of offer office often old on once one only
open option or order other our out over own page paper part pay people place plan please point possible price problem
product project question read ready reason receive refund report request result return right room run same say search
second see send service set she short should show since small so some something soon state step still such summary
support sure table take team tell than thank that the their them then there these they thing think this those three
ticket time to today together told tomorrow too tool train travel try two under until up update us use user very wait
want was water way we week well were what when where which while who why will with within without word work would write
year yes yesterday yet you your
""".split()


def message(number: int) -> AnyMessage:
    """Message `number` of a conversation: the user's where it is even, the assistant's where it is odd."""
    source = random.Random(number)
    text = " ".join(source.choices(_WORDS, k=WORDS_PER_MESSAGE)).capitalize() + "."
    kind = AIMessage if number % 2 else HumanMessage
    return kind(content=text, id=str(uuid.UUID(int=source.getrandbits(128), version=4)))


def messages(count: int) -> list[AnyMessage]:
    """The first `count` messages."""
    return [message(number) for number in range(count)]


def image(number: int, size: int) -> str:
    """Image `number`: `size` random bytes in base64, for images are compressed already."""
    return base64.b64encode(random.Random(number).randbytes(size)).decode()
