"""An answer on the terminal: which tokens were drafted, and which the target supplied itself."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

DRAFTED, OWN = "green", "bold magenta"


def coloured(pieces: Sequence[str], own_positions: Collection[int]) -> Text:
    """The pieces of an answer as one text; those at `own_positions` are the target's own tokens."""
    from rich.text import Text

    own = set(own_positions)
    return Text.assemble(*((piece, OWN if place in own else DRAFTED) for place, piece in enumerate(pieces)))


def legend(num_tokens: int, own_positions: Collection[int]) -> Text:
    """What the colours mean, with the number of tokens of each kind."""
    from rich.text import Text

    own = len(set(own_positions))
    return Text.assemble(
        (f"{num_tokens - own} drafted and accepted", DRAFTED),
        ", ",
        (f"{own} by the target itself", OWN),
        " (first and bonus tokens)",
    )
