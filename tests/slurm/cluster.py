"""A real Slurm with accounting on this machine: ten virtual nodes with four fake GPUs each.

Own munged, MariaDB, slurmdbd, slurmctld and slurmd's in a temporary directory, from Debian's
packages, as root; nothing of an installed Slurm's configuration is read or changed. Every wait is
bounded, and ``stop`` ends every daemon that ``start`` started, however far the start came.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import stat
import subprocess
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil

from tests.waiting import LIMIT_S, wait_until

NODES, GPUS_PER_NODE = 10, 4
SHARED_NODES = 6  # of the main partition; each of the others is one test's, to break it
_END_S = 3
_HOSTS = Path("/etc/hosts")
_HOSTS_MARK = "# zeropp-slurm-test"
_NVIDIA_MAJOR = 195
_ACCOUNT = "science"  # the only one that may submit
_PACKAGES = {
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "slurmdbd": "slurmdbd",
    "sbatch": "slurm-client",
    "mariadbd": "mariadb-server",
    "mariadb-install-db": "mariadb-server",
}


def unavailable() -> str:
    """Why no Slurm can be started here, in one line; empty where it can."""
    if os.geteuid() != 0:
        return "starting a Slurm needs root"
    missing = [name for name in _PACKAGES if shutil.which(name) is None]
    if missing:
        packages = " ".join(dict.fromkeys(_PACKAGES[name] for name in missing))
        return f"not installed: {', '.join(missing)} (apt-get install {packages})"
    return ""


class SlurmCluster:
    """The daemons of one test session."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._first_port = _free_ports(2 + NODES)
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.names = [f"zpnode{index}" for index in range(NODES)]

    @property
    def environment(self) -> dict[str, str]:
        """What a client of this cluster has in its environment."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_"))}
        places = {"SLURM_CONF": "slurm.conf", "MYSQL_UNIX_PORT": "mariadb.socket"}
        return kept | {name: str(self.directory / file) for name, file in places.items()}

    def start(self) -> None:
        """Start everything and wait until a job has run on every node."""
        self._write_files()
        self._start_munge()
        self._start_database()
        self.start_controller()
        add = ("sacctmgr", "--immediate", "add")  # once slurmctld has entered its cluster
        account = (*add, "account", _ACCOUNT, "cluster=zeropp")
        wait_until(lambda: self._succeeds(*account), "the cluster's entry in slurmdbd")
        self.run(*add, "user", "root", f"account={_ACCOUNT}", f"defaultaccount={_ACCOUNT}")
        for name in self.names:
            self.start_node(name)
        everywhere = ("--partition=apart", f"--nodes={NODES}", f"--ntasks={NODES}")
        probe = ("srun", *everywhere, "--immediate=20", "true")
        wait_until(lambda: self._succeeds(*probe), "a probe job on every node")

    def stop(self) -> None:
        """End every job and daemon; safe to call at any time, any number of times."""
        if "slurmctld" in self._daemons:
            self._succeeds("scancel", "--user=root", "--full", "--signal=KILL")
        for daemon in self._daemons.values():
            daemon.terminate()
        for name in list(self._daemons):
            self._end(name)
        self._reap_steps()
        if _HOSTS_MARK in _HOSTS.read_text():
            kept = [line for line in _lines(_HOSTS) if _HOSTS_MARK not in line]
            _HOSTS.write_text("".join(kept))

    def start_controller(self) -> None:
        """Start slurmctld with the state that the last one left, and wait for its answer."""
        recover = [] if (self.directory / "state" / "job_state").exists() else ["-c"]
        self._spawn("slurmctld", "slurmctld", "-D", *recover)
        wait_until(lambda: self._succeeds("scontrol", "ping"), "slurmctld")

    def stop_controller(self) -> None:
        """Take slurmctld away; jobs go on."""
        self._end("slurmctld")

    def start_node(self, name: str) -> None:
        """Start one slurmd."""
        self._spawn(name, "slurmd", "-D", "-N", name)

    def kill_node(self, name: str) -> None:
        """A node dies: its slurmd and every process that it started, at once."""
        for process in self._of_node(name):
            _kill(process)
        self._end(name)

    def take_node(self, name: str) -> None:
        """Submit a job that preempts whatever runs on a node."""
        urgent = ("--partition=urgent", f"--nodelist={name}", "--exclusive", "--time=1")
        quiet = (f"--account={_ACCOUNT}", "--output=/dev/null", "--wrap=true")
        self.run("sbatch", *urgent, *quiet)

    def end_in(self, job: str, seconds: int) -> None:
        """Let a running job reach its time limit so soon; Slurm's shortest limit is a minute, and
        it looks at all limits every 30 s."""
        self.run("scontrol", "update", f"JobId={job}", f"EndTime=now+{seconds}")

    def freeze_node(self, name: str) -> None:
        """A node stands still with everything that it runs, and can be thawed."""
        for process in self._of_node(name):
            process.suspend()

    def thaw_node(self, name: str) -> None:
        """It goes on where it stood."""
        for process in reversed(self._of_node(name)):
            process.resume()

    def _of_node(self, name: str) -> list[psutil.Process]:
        """The slurmd of a node, its step daemons and all that they started."""
        slurmd = psutil.Process(self._daemons[name].pid)
        steps = [
            process
            for process in psutil.process_iter(["cmdline"])
            if process.name() == "slurmstepd"
            and any(_node_of(child) == name for child in _children(process))
        ]
        return [slurmd, *steps, *(child for step in steps for child in _children(step))]

    def run(self, *command: str) -> str:
        """The output of a client; raises RuntimeError with what it said."""
        done = subprocess.run(
            command,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.returncode}: {done.stderr}")
        return done.stdout

    def _succeeds(self, *command: str) -> bool:
        with suppress(RuntimeError, subprocess.TimeoutExpired):
            self.run(*command)
            return True
        return False

    def _write_files(self) -> None:
        """The configuration, and the names of the virtual nodes, which must resolve: ranks find
        each other by them."""
        for name in ("state", "spool", "devices"):
            (self.directory / name).mkdir(parents=True, exist_ok=True)
        for index in range(GPUS_PER_NODE):
            device = self.directory / "devices" / f"gpu{index}"
            if not device.exists():
                os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(_NVIDIA_MAJOR, index))
        first_node = self._first_port + 2
        values = {
            "directory": self.directory,
            "nodes": f"zpnode[0-{NODES - 1}]",
            "shared_nodes": f"zpnode[0-{SHARED_NODES - 1}]",
            "gpus": GPUS_PER_NODE,
            "controller_port": self._first_port,
            "dbd_port": self._first_port + 1,
            "node_ports": f"{first_node}-{first_node + NODES - 1}",
        }
        for name in ("slurm.conf", "slurmdbd.conf"):
            text = (Path(__file__).parent / name).read_text().format(**values)
            (self.directory / name).write_text(text)
            (self.directory / name).chmod(0o600)
        gpus = f"{self.directory}/devices/gpu[0-{GPUS_PER_NODE - 1}]"
        gres = f"AutoDetect=off\nName=gpu Type=fake File={gpus}\n"
        (self.directory / "gres.conf").write_text(gres)
        lines = [line for line in _lines(_HOSTS) if _HOSTS_MARK not in line]
        if lines and not lines[-1].endswith("\n"):
            lines[-1] += "\n"
        lines.append(f"127.0.0.1 {' '.join(self.names)} {_HOSTS_MARK}\n")
        _HOSTS.write_text("".join(lines))

    def _start_munge(self) -> None:
        key, socket = self.directory / "munge.key", self.directory / "munge.socket"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        files = {"key-file": key, "socket": socket}
        for name in ("pid", "log", "seed"):
            files[f"{name}-file"] = self.directory / f"munge.{name}"
        options = [f"--{name}={path}" for name, path in files.items()]
        # The directory of a test is deep and writable by root alone: --force accepts that.
        self._spawn("munged", "munged", "--foreground", "--force", *options)
        wait_until(socket.exists, "munged")

    def _start_database(self) -> None:
        """MariaDB with slurmdbd before it: what sacct reads."""
        data, socket = self.directory / "database", self.directory / "mariadb.socket"
        if not data.exists():
            self.run("mariadb-install-db", "--no-defaults", "--user=root", f"--datadir={data}")
        options = ("--skip-networking", "--innodb-flush-log-at-trx-commit=0")
        places = (f"--datadir={data}", f"--socket={socket}", f"--pid-file={data}/pid")
        self._spawn("mariadbd", "mariadbd", "--no-defaults", "--user=root", *places, *options)
        admin = ("mariadb-admin", "--no-defaults", f"--socket={socket}")
        wait_until(lambda: self._succeeds(*admin, "ping"), "mariadbd")
        self._spawn("slurmdbd", "slurmdbd", "-D")
        wait_until(lambda: self._succeeds("sacctmgr", "-n", "show", "cluster"), "slurmdbd")

    def _spawn(self, name: str, *command: str) -> None:
        with (self.directory / f"{name}.out").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig=KILL", *command],  # a killed test leaves no daemon
                env=self.environment,
                cwd=self.directory,  # a daemon that crashes leaves its core file there
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _end(self, name: str) -> None:
        daemon = self._daemons.pop(name, None)
        if daemon is None:
            return
        daemon.terminate()
        try:
            daemon.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait(timeout=10)

    def _reap_steps(self) -> None:
        """Step daemons outlive slurmd, to report to it; ours have a log in our directory open."""
        for process in psutil.process_iter(["name"]):
            held: list[str] = []
            with suppress(OSError):
                held = [os.readlink(link) for link in Path(f"/proc/{process.pid}/fd").iterdir()]
            is_mine = any(path.startswith(str(self.directory)) for path in held)
            if process.info["name"] == "slurmstepd" and is_mine:
                for doomed in (*_children(process), process):
                    _kill(doomed)


def _free_ports(number: int) -> int:
    """The first of this many free ports in a row, where neither ranks nor outgoing connections of
    this machine take any."""
    while True:
        first = 10_000 + secrets.randbelow(10_000 - number)
        with suppress(OSError), ExitStack() as stack:
            for port in range(first, first + number):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines(keepends=True)


def _children(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return process.children(recursive=True)
    return []


def _node_of(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        return process.environ().get("SLURMD_NODENAME", "")
    return ""


def _kill(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.kill()
