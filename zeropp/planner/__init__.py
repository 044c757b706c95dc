"""What the planners of all contenders share. Imports no torch.

In: a Task and a contender's knobs. Out: degrees, the number of microbatches, ZeroPP's orders.
Read ``degrees``, which fills in degrees that are ``auto`` and refuses what no contender could run,
then ``orders``, which makes the orders of a ZeroPP step from which the simulator chooses. The
planners themselves are the ``plan.py`` of every contender.
"""
