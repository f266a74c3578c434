"""Leaving rows out of a located part."""

from __future__ import annotations

from itertools import compress

import numpy as np
import numpy.typing as npt

from xtok.chat.locate import LocatedPart
from xtok.chat.places import TextTokens
from xtok.tokenizers import FlatTokens

__all__ = ["keep_rows"]


def keep_rows(part: LocatedPart, keep: npt.NDArray[np.bool_]) -> LocatedPart:
    """The rows that `keep` (bool [D]) marks, with their tokens; the part itself where that is all of them."""
    if bool(keep.all()):
        return part
    tokens = part.tokens
    chosen = np.repeat(keep, tokens.lengths)
    offsets = np.append(0, np.cumsum(tokens.lengths[keep]))
    rows = keep.tolist()
    text = TextTokens(
        tokens=FlatTokens(tokens.ids[chosen], offsets),
        starts=part.text.starts[chosen],
        ends=part.text.ends[chosen],
        by_bytes=part.text.by_bytes[keep],
        data=list(compress(part.text.data, rows)),
    )
    return LocatedPart(
        side=part.side,
        chats=list(compress(part.chats, rows)),
        text=text,
        token_mask=part.token_mask[chosen],
        eot_index=part.eot_index[keep],
        regions=list(compress(part.regions, rows)),
        refusals=list(compress(part.refusals, rows)),
    )
