"""One job on three hosts: three network namespaces on a bridge, each with its own host name.

The logits are those of a run on one host, byte for byte, over both message layers, and so over a network that is slow,
late, and loses and overtakes frames (a switch in user space, since not every kernel has netem); a link that goes down
ends the job in time. Exit code 77 (skipped) where namespaces are not permitted. Root only; standard library only.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tools"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "support"))
from program import BIN, CHECKPOINTS, OB1, environment, run  # noqa: E402
from slow_switch import SlowSwitch  # noqa: E402

HOSTS = 3
PREFIX = f"dsv{os.getpid() % 10000}n"
BRIDGE = f"dsv{os.getpid() % 10000}br"
AGENT = pathlib.Path(__file__).resolve().parent / "support/enter_namespace.sh"
TIMEOUT = 6
COMMON = ["--model", CHECKPOINTS / "mini", "--speculate", "off"]
SHORT = [*COMMON, "--prompt-ids", "0,17,5,300,42,7", "--ignore-eos", "-n", "6"]
# Otherwise mpirun itself waits for the daemon of a lost host for a quarter of an hour (docs/failures.md).
KEEPALIVE = ["--mca", "oob_tcp_keepalive_time", "1", "--mca", "oob_tcp_keepalive_intvl", "1",
             "--mca", "oob_tcp_keepalive_probes", "2"]
LAYERS = {
    "ob1": [*OB1, "--mca", "btl", "tcp,self"],
    "ucx": ["--mca", "pml", "ucx", "--mca", "opal_common_ucx_tls", "any", "--mca", "opal_common_ucx_devices", "any",
            "-x", "UCX_TLS=tcp,self"],
}
NETWORKS = {"eth0": "10.77.0", "eth1": "10.78.0"}  # a bridge; the switch in user space


def ip(*arguments):
    subprocess.run(arguments, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def inside(number, *arguments):
    ip("ip", "netns", "exec", f"{PREFIX}{number}", *arguments)


def build_network():
    ip("ip", "link", "add", BRIDGE, "type", "bridge")
    ip("ip", "link", "set", BRIDGE, "up")
    for number in range(1, HOSTS + 1):
        ip("ip", "netns", "add", f"{PREFIX}{number}")
        ip("ip", "link", "add", f"{PREFIX}{number}v", "type", "veth", "peer", "name", "eth0", "netns", f"{PREFIX}{number}")
        ip("ip", "link", "set", f"{PREFIX}{number}v", "master", BRIDGE, "up")
        inside(number, "ip", "link", "set", "lo", "up")
        inside(number, "ip", "address", "add", f"10.77.0.{number}/24", "dev", "eth0")
        inside(number, "ip", "link", "set", "eth0", "up")


def remove_network():
    for number in range(1, HOSTS + 1):
        listed = subprocess.run(["ip", "netns", "pids", f"{PREFIX}{number}"], capture_output=True, text=True)
        for pid in listed.stdout.split():
            try:
                os.kill(int(pid), 9)
            except ProcessLookupError:
                pass
        subprocess.run(["ip", "netns", "delete", f"{PREFIX}{number}"], stderr=subprocess.DEVNULL)
    subprocess.run(["ip", "link", "delete", BRIDGE], stderr=subprocess.DEVNULL)


def shape(*discipline):
    """Every host's way out; nothing: as fast as it goes."""
    for number in range(1, HOSTS + 1):
        subprocess.run(["ip", "netns", "exec", f"{PREFIX}{number}", "tc", "qdisc", "delete", "dev", "eth0", "root"],
                       stderr=subprocess.DEVNULL)
        if discipline:
            inside(number, "tc", "qdisc", "add", "dev", "eth0", "root", *discipline)


def start(layer, arguments, network="eth0", **files):
    """mpirun itself runs on the first host."""
    address = NETWORKS[network]
    return subprocess.Popen(
        ["ip", "netns", "exec", f"{PREFIX}1", "unshare", "-u", "sh", "-c", 'hostname node1 && exec "$@"', "sh",
         "mpirun", "-np", str(HOSTS), "--host", ",".join(f"{address}.{n}:1" for n in range(1, HOSTS + 1)),
         "--map-by", "node", "--bind-to", "none", "--mca", "plm_rsh_agent", str(AGENT), "--mca", "plm_rsh_no_tree_spawn", "1",
         *KEEPALIVE, "--mca", "oob_tcp_if_include", f"{address}.0/24", "--mca", "btl_tcp_if_include", f"{address}.0/24",
         "-x", f"UCX_NET_DEVICES={network}", *LAYERS[layer], str(BIN / "dsv41-mpi"), *map(str, arguments)],
        stdin=subprocess.DEVNULL, env=environment(DSV41_NAMESPACE=PREFIX), **files)


def ranks_in_namespaces():
    """Processes of the program in the namespaces of this test."""
    found = []
    for number in range(1, HOSTS + 1):
        listed = subprocess.run(["ip", "netns", "pids", f"{PREFIX}{number}"], capture_output=True, text=True).stdout
        for pid in listed.split():
            try:
                if os.readlink(f"/proc/{pid}/exe") == str(BIN / "dsv41-mpi"):
                    found.append(pid)
            except OSError:
                pass  # it is gone
    return found


class Namespaces(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.directory = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.directory.cleanup)
        alone = pathlib.Path(cls.directory.name) / "alone.h5"
        cls.output = run([*SHORT, "--dump-logits", alone], ranks=HOSTS, mca=OB1).out
        cls.expected = alone.read_bytes()

    def check_same(self, layer, network="eth0"):
        dump = pathlib.Path(self.directory.name) / f"{self.id()}.{layer}.h5"
        process = start(layer, [*SHORT, "--dump-logits", dump], network, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            out, errors = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        errors = errors.decode(errors="replace")
        self.assertEqual(process.returncode, 0, errors)
        self.assertIn("2 expert ranks", errors)
        self.assertIn("tcp", errors)
        self.assertEqual(out.decode(), self.output)
        self.assertEqual(dump.read_bytes(), self.expected)
        return errors

    def test_hosts(self):
        process = start("ob1", [*SHORT, "--dry-run"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        errors = process.communicate(timeout=60)[1].decode()
        for rank in range(HOSTS):
            self.assertRegex(errors, rf"rank {rank} on node{rank + 1}: ")

    def test_same_bytes(self):
        for layer in LAYERS:
            with self.subTest(layer):
                self.check_same(layer)

    def test_same_bytes_over_a_late_and_unreliable_network(self):
        names = [f"{PREFIX}{number}t" for number in range(1, HOSTS + 1)]
        switch = SlowSwitch(names, delay=0.005, jitter=0.001, rate=100e6, loss=0.002)
        self.addCleanup(switch.close)
        for number, name in enumerate(names, 1):
            ip("ip", "link", "set", name, "netns", f"{PREFIX}{number}")
            inside(number, "ip", "link", "set", name, "name", "eth1")
            inside(number, "ip", "address", "add", f"{NETWORKS['eth1']}.{number}/24", "dev", "eth1")
            inside(number, "ip", "link", "set", "eth1", "up")
        for layer in LAYERS:
            with self.subTest(layer):
                before = switch.forwarded
                errors = self.check_same(layer, "eth1")
                self.assertGreater(switch.forwarded - before, 100)  # it did go this way
                # Ten layers wait for a request and a reply of about 5 ms each.
                self.assertLess(float(re.search(r"decode .* steps, ([\d.]+) tok/s", errors)[1]), 12, errors)

    def slow_network(self, *discipline):
        try:
            shape(*discipline)
        except subprocess.CalledProcessError as error:
            self.skipTest(f"this kernel has no {discipline[0]}: {error.output.strip()}")
        self.addCleanup(shape)
        for layer in LAYERS:
            with self.subTest(layer):
                self.check_same(layer)

    def test_same_bytes_with_netem(self):
        self.slow_network("netem", "delay", "5ms", "rate", "100mbit")

    def test_same_bytes_with_limited_rate(self):
        self.slow_network("tbf", "rate", "10mbit", "burst", "16kb", "latency", "200ms")

    def test_link_goes_down(self):
        for layer in LAYERS:
            with self.subTest(layer), tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
                process = start(layer, [*COMMON, "--prompt-ids", "0", "--ignore-eos", "-n", "4000", "--rank-timeout", TIMEOUT],
                                stdout=out, stderr=errors)
                end = time.monotonic() + 60
                while os.fstat(out.fileno()).st_size < 20 and time.monotonic() < end and process.poll() is None:
                    time.sleep(0.02)
                self.assertGreaterEqual(os.fstat(out.fileno()).st_size, 20, os.pread(errors.fileno(), 1 << 20, 0))
                inside(3, "ip", "link", "set", "eth0", "down")
                began = time.monotonic()
                try:
                    code = process.wait(TIMEOUT + 30)
                finally:
                    seconds = time.monotonic() - began
                    process.kill()
                    process.wait()
                    inside(3, "ip", "link", "set", "eth0", "up")
                text = os.pread(errors.fileno(), 1 << 20, 0).decode(errors="replace")
                self.assertNotEqual(code, 0, text)
                self.assertLess(seconds, TIMEOUT + 5, text)
                self.assertTrue(re.search(r"rank \d \(node\d\)|node3|10\.77\.0\.3", text), text)
                self.assertGreaterEqual(os.fstat(out.fileno()).st_size, 20)
                end = time.monotonic() + 10  # the far side may notice a little later
                while (left := ranks_in_namespaces()) and time.monotonic() < end:
                    time.sleep(0.2)
                self.assertEqual(left, [], "ranks are left behind")


if __name__ == "__main__":
    try:
        build_network()
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        remove_network()
        print(f"skipped: network namespaces are not available: {getattr(error, 'output', None) or error}")
        sys.exit(77)
    try:
        program = unittest.main(exit=False, verbosity=2)
    finally:
        remove_network()
    sys.exit(not program.result.wasSuccessful())
