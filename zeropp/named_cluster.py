"""Clusters by name: the descriptions of ``conf/cluster``, which the installed package has, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zeropp.cluster import Cluster, Device, Link
from zeropp.layout import InfeasibleError

_PACKAGE = Path(__file__).parent
_FOLDERS = (_PACKAGE / "clusters", _PACKAGE.parent / "conf" / "cluster")  # installed, checkout


def named_cluster(name: str) -> Cluster:
    """The description of a cluster; raises InfeasibleError, in one line, where there is none."""
    files = {path.stem: path for folder in _FOLDERS for path in folder.glob("*.yaml")}
    if name not in files:
        raise InfeasibleError(
            f"cluster={name!r}: must be one of {', '.join(sorted(files))}, or a zeropp.Cluster"
        )
    try:
        import yaml
    except ImportError:
        raise InfeasibleError(
            f"cluster={name!r}: reading it needs PyYAML (install it, or give a zeropp.Cluster)"
        ) from None
    return _cluster(yaml.safe_load(files[name].read_text()))


def _cluster(found: dict[str, Any]) -> Cluster:
    parts = {
        "device": Device(**found["device"]),
        "intra": Link(**found["intra"]),
        "inter": Link(**found["inter"]),
        "group_shares": tuple(found.get("group_shares", ())),
    }
    return Cluster(**{**found, **parts})
