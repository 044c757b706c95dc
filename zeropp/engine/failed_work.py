"""What an error keeps after work that failed: the frames of the work, with all that is in them."""

from __future__ import annotations

import traceback


def free_frames(error: BaseException) -> None:
    """Free the tensors and process groups in the frames of failed work, and in those of the errors
    during whose handling this one was raised.

    Torch, for example, writes a failed collective into its log, which fails in its turn if the
    process group was destroyed meanwhile.
    """
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            left += [one.__cause__, one.__context__]
