"""The process behind a TCP connection between two sockets of this machine, from `/proc`.

Ports identify the client's socket (`/proc/net/tcp`, `tcp6`), and that its owner (`/proc/PID/fd`), the eldest of forks
that share it. A *program* is the file and, for an interpreter, the script, without arguments; inline code as a digest.
Forks and `multiprocessing` children count as their parent's program.

Invisible are clients of other machines, namespaces or users, or with `PR_SET_DUMPABLE` off. A process can forge its
script, but not its file, start and ancestors.

Runs as `python -I -S peer_process.py PARENT_PID`, standard library only: in the server, thousands of system calls would
each wait for the interpreter lock.
"""

import json
import os
import re
import select
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import NamedTuple

PARENT_CHECK_S = 5.0
LONGEST_PROGRAM = 200  # characters
MOST_ANCESTORS = 32

_TABLES = {4: Path("/proc/net/tcp"), 16: Path("/proc/net/tcp6")}  # by the bytes of their addresses
_MAPPED = bytes(10) + b"\xff\xff"
_INODE = 9  # the column of a table, counted from the colon in front of the addresses
_INTERPRETER = re.compile(r"(python|pypy|ruby|perl|php)[\d.]*|(ba|da|z|k)?sh|node|nodejs|bun|deno")
_WITH_VALUE = frozenset({"-X", "-W", "-r", "-o", "--require", "--import", "--loader"})
_WITH_CODE = re.compile(r"-[A-Za-z]*[cepEm]|--eval|--print")
_CHILD = re.compile(r"from multiprocessing\.(spawn|forkserver) import (\w+); \2\([^;\n]*\)")


class Ends(NamedTuple):
    client: str
    client_port: int
    server: str
    server_port: int
    likely: int = 0
    """Process to check first, or 0."""

    @property
    def is_local(self) -> bool:
        """True if both ends are on this machine."""
        client = _packed(self.client)
        return client == _packed(self.server) or client[:1] == b"\x7f"


class PeerProcess(NamedTuple):
    id: str
    """Process id, and clock ticks from boot to start."""
    program: str
    began_at: float
    """Unix seconds, at the end of the tick."""
    ancestors: list[str]
    """Ids, parent first, including the session leader."""


class _Stat(NamedTuple):
    parent: int
    session: int
    id: str
    ticks: int


def find_processes(connections: Sequence[Ends]) -> list[PeerProcess | None]:
    """Find the clients' processes; None for invisible ones."""
    sockets = [f"socket:[{inode}]" if inode else "" for inode in _find_inodes(connections)]
    owners = _find_owners(set(filter(None, sockets)), {each.likely for each in connections} - {0})
    return [_describe(owners[link]) if link in owners else None for link in sockets]


def _find_inodes(connections: Sequence[Ends]) -> list[str]:
    inodes = [""] * len(connections)
    for size, path in _TABLES.items():
        if not all(inodes):
            with suppress(OSError):
                table = path.read_bytes()
                inodes = [
                    inode or _find_inode(table, size, ends) for inode, ends in zip(inodes, connections, strict=True)
                ]
    return inodes


def _find_inode(table: bytes, size: int, ends: Ends) -> str:
    client, server = _words(ends.client, size), _words(ends.server, size)
    begin = table.find(f": {client}:{ends.client_port:04X} {server}:{ends.server_port:04X} ".encode())
    row = table[begin : table.find(b"\n", begin)].split() if begin >= 0 else []
    return row[_INODE].decode().lstrip("0") if len(row) > _INODE else ""


def _packed(address: str) -> bytes:
    packed = socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address.partition("%")[0])
    return packed.removeprefix(_MAPPED)


def _words(address: str, size: int) -> str:
    # The tables print 32-bit words in the machine's byte order.
    packed = _packed(address)
    packed = packed if len(packed) == size else _MAPPED + packed
    return "".join(f"{int.from_bytes(packed[at : at + 4], sys.byteorder):08X}" for at in range(0, len(packed), 4))


def _find_owners(links: set[str], likely: set[int]) -> dict[str, int]:
    found: dict[str, int] = {}
    for pid in chain(likely, _young_first()):
        if len(found) == len(links):
            break
        with suppress(OSError), os.scandir(f"/proc/{pid}/fd") as descriptors:
            for descriptor in descriptors:
                with suppress(OSError):
                    link = os.readlink(descriptor.path)  # noqa: PTH115  # of thousands
                    if link in links and link not in found:
                        found[link] = _eldest(pid, descriptor.name, link)
    return found


def _young_first() -> Iterator[int]:
    yield from sorted((int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()), reverse=True)


def _eldest(pid: int, descriptor: str, link: str) -> int:
    # Forks that share the socket have it under the same number.
    with suppress(OSError):
        while str(Path(f"/proc/{_stat(pid).parent}/fd/{descriptor}").readlink()) == link:
            pid = _stat(pid).parent
    return pid


def _describe(pid: int) -> PeerProcess | None:
    try:
        stat, program = _stat(pid), _program(pid)
    except OSError:
        return None
    ancestors: list[str] = []
    above = stat.parent
    with suppress(OSError):
        while above and len(ancestors) < MOST_ANCESTORS:
            parent = _stat(above)
            ancestors.append(parent.id)
            above = parent.parent
        leader = _stat(stat.session).id
        ancestors += [leader] * (leader not in (stat.id, *ancestors))
    return PeerProcess(stat.id, program, _began_at(stat.ticks), ancestors)


@lru_cache(maxsize=1 << 12)
def _began_at(ticks: int) -> float:
    # Cached: the two clocks drift apart, and a process has one start. Of three readings the latest, since a pause
    # between the two calls makes the boot seem earlier.
    booted_at = max(time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) for _ in range(3))
    return round(booted_at + (ticks + 1) / os.sysconf("SC_CLK_TCK"), 2)


def _stat(pid: int) -> _Stat:
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return _Stat(int(fields[1]), int(fields[3]), f"{pid}.{int(fields[19])}", int(fields[19]))


def _program(pid: int) -> str:
    file, words, parent = _file(pid), _command(pid), _stat(pid).parent
    option, script = _find_script(words) if _INTERPRETER.fullmatch(Path(file).name) else ("", "")
    with suppress(OSError):
        is_of_parent = _command(parent) == words or (option == "-c" and _CHILD.fullmatch(script))
        if is_of_parent and _file(parent) == file:
            return _program(parent)
    if option and option != "-m":
        script = _digest(script)
    elif script and not option:
        script = os.path.normpath(Path(f"/proc/{pid}/cwd").readlink() / script)
    program = " ".join(filter(None, (file, option, script)))
    program = program.encode(errors="replace").decode()
    return program if len(program) <= LONGEST_PROGRAM else f"{program[: LONGEST_PROGRAM - 9]}~{_digest(program)}"


def _file(pid: int) -> str:
    return str(Path(f"/proc/{pid}/exe").readlink()).removesuffix(" (deleted)")


def _command(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode(errors="replace").split("\0")


def _find_script(words: Sequence[str]) -> tuple[str, str]:
    # Guesses option and script; a wrong guess is at least the same for the same command.
    rest = iter(words[1:])
    for word in rest:
        if _WITH_CODE.fullmatch(word):
            return "-m" if word.endswith("m") else "-c", next(rest, "")
        if not word.startswith("-") and word != "run":
            return "", word
        if word in _WITH_VALUE:
            next(rest, "")
    return "", ""


def _digest(text: str) -> str:
    return sha256(text.encode(errors="replace")).hexdigest()[:8]


def main(parent: int) -> None:
    """Answer lines of `Ends` until the input or `parent` ends."""
    while os.getppid() == parent:
        if select.select([sys.stdin], [], [], PARENT_CHECK_S)[0]:
            line = sys.stdin.readline()  # the only one: the next one comes after its answer
            if not line:
                break
            sys.stdout.write(f"{json.dumps(find_processes([Ends(*each) for each in json.loads(line)]))}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
