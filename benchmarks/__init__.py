"""The suite: RunSpec -> Plan -> launcher -> RunRecord -> Report."""
