"""From a request to a Plan: degrees, then cuts and order. Imports no torch.

``degrees`` fills in ``auto`` degrees; ``zeropp_plan`` is ZeroPP's planner, whose ``assemble`` and
``refuse`` the planners of the other contenders use, too.
"""
