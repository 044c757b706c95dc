"""Hangs that others have reported, as far as their reports tell the order of work.

Of those that were asked for, torchtitan issue 4064 could not be found in the public threads at
hand. Pytorch issue 172668, which names itself the cause of torchtitan issue 2209, stands for it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import pytest

from zeropp.emulate.log import Issued, Log, Message
from zeropp.emulate.rendezvous import stuck

GroupOf = Callable[[int, int], Hashable]


def one_group(source: int, target: int) -> Hashable:
    """The parent group, or one for all messages of a direction."""
    del source, target
    return "group"


def directed(source: int, target: int) -> Hashable:
    """A group for each ordered pair of ranks."""
    return source, target


def log_of(actions: str, group_of: GroupOf) -> list[Issued]:
    """What a rank issues. ``0>1:a`` is message a from rank 0 to rank 1, which both ranks write
    alike; ``wait a`` lets compute wait for it, ``x`` is compute x, ``end`` waits for compute."""
    log, ends = Log(), dict[str, int]()
    for action in actions.split(", "):
        if action == "end":
            log.sync("compute", "the end of compute")
        elif action.startswith("wait "):
            log.wait("compute", ends[action.removeprefix("wait ")])
        elif ">" in action:
            pair, name = action.split(":")
            source, target = map(int, pair.split(">"))
            stream = f"nccl {group_of(source, target)}"
            log.follow(stream, "compute")
            message = Message(group_of(source, target), source, target, name)
            log.messages(stream, [message], action)
            ends[name] = log.record(stream)
        else:
            log.kernel("compute")
    return log.issued


# Pytorch pull request 195760: eight stages on four ranks, two microbatches, forwards. All forward
# messages share one group, so a rank's receive stands behind its sends to another rank.
_PASSES_ON = "{0}>{1}:0F{0}, wait 0F{0}, 0F{1}, {1}>{2}:0F{1}"
LOOPED = {
    0: "0F0, 0>1:0F0, 1F0, 0>1:1F0, 3>0:0F3, wait 0F3, 0F4, end",
    1: _PASSES_ON.format(0, 1, 2),  # it has not asked for its second microbatch yet
    2: _PASSES_ON.format(1, 2, 3),
    3: _PASSES_ON.format(2, 3, 0),
}
# The same with receives that are posted one action earlier, which closes the cycle.
CYCLE = {
    0: "0F0, 0>1:0F0, 3>0:0F3, 1F0, 0>1:1F0, wait 0F3, 0F4, end",
    1: "0>1:0F0, 0>1:1F0, wait 0F0, 0F1, 1>2:0F1, wait 1F0, 1F1, end",
    2: _PASSES_ON.format(1, 2, 3),
    3: _PASSES_ON.format(2, 3, 0),
}


def test_a_receive_behind_sends_to_another_rank_pytorch_195760() -> None:
    shared = stuck({rank: log_of(text, one_group) for rank, text in LOOPED.items()})
    assert "the host is at the end of compute" in shared[0]  # 0F4 waits for 1F0's receiver
    apart = stuck({rank: log_of(text, directed) for rank, text in LOOPED.items()})
    assert "the host has issued all" in apart[0]  # the second send is left, and delays nothing


def test_a_cycle_over_the_edges_of_one_group_pytorch_195760() -> None:
    assert stuck({rank: log_of(text, one_group) for rank, text in CYCLE.items()}).keys() == {
        0, 1, 2, 3,
    }  # fmt: skip
    assert stuck({rank: log_of(text, directed) for rank, text in CYCLE.items()}) == {}


# Pytorch issue 172668: two ranks with two stages each, whose receives stand where they are needed.
DEFERRED = {
    0: "0F1, 0>1:0SEND_F1, 1>0:1SEND_F0, wait 1SEND_F0, 2F0, end",
    1: "1F0, 1>0:1SEND_F0, 0>1:0SEND_F1, wait 0SEND_F1, 1F1, end",
}
SWAPPED = {
    0: "0>1:2SEND_F1, 0F2, 0>1:0SEND_F2, 1>0:3SEND_B0, wait 3SEND_B0, 2B0, end",
    1: "0>1:2SEND_F1, 1>0:3SEND_B0, wait 2SEND_F1, 3F1, 3B1, 0>1:0SEND_F2, wait 0SEND_F2, 1F2, end",
}


@pytest.mark.parametrize("order", [DEFERRED, SWAPPED], ids=["deferred", "swapped"])
def test_sends_that_wait_for_each_other_pytorch_172668(order: dict[int, str]) -> None:
    assert stuck({rank: log_of(text, one_group) for rank, text in order.items()}).keys() == {0, 1}
    assert stuck({rank: log_of(text, directed) for rank, text in order.items()}) == {}


# Megatron-LM pull request 5240: messages that are sent one by one make a communicator for each
# pair of neighbours at its first message, and ranks may come to these in orders that do not fit.
# Its cure is one batch per rank. The order in Megatron-Core 0.16.1 itself does end
# (``test_device_order``), so that the report's cause stays its author's assumption.


def _around(rank: int, how: str) -> list[Issued]:
    """Every rank sends to the next one, and then receives from the one before it."""
    log, after, before = Log(), (rank + 1) % 4, (rank - 1) % 4
    messages = [
        Message(how, source, target, "activation")
        for source, target in ((rank, after), (before, rank))
    ]
    log.kernel("compute")
    if how == "batched":
        log.messages("nccl", messages, "both")
        return log.issued
    for message in messages:
        pair = tuple(sorted((message.source, message.target)))
        if how == "connected at the first message":
            log.meet(pair, 2)
        log.messages(f"nccl {pair}", [message], str(message))
    return log.issued


def test_pairs_that_connect_at_their_first_message_megatron_5240() -> None:
    hows = ("connected at the first message", "connected before", "batched")
    found = {how: stuck({rank: _around(rank, how) for rank in range(4)}) for how in hows}
    assert found.pop(hows[0]).keys() == {0, 1, 2, 3}
    assert found == {how: {} for how in hows[1:]}
