"""An Ethernet switch in user space that is late, slow and unreliable on purpose, for kernels without netem.

Each port is a TAP device that the caller moves to where it is wanted. A frame is forwarded when its delay is over and the
port has sent what came before at its rate; with jitter, frames overtake each other; some are lost.
"""

import fcntl
import heapq
import os
import random
import select
import struct
import threading
import time

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
FRAME = 65536


class SlowSwitch:
    def __init__(self, names, delay, jitter=0.0, rate=None, loss=0.0):
        """delay and jitter in seconds, rate in bits per second out of a port, loss as a fraction of frames."""
        self.delay, self.jitter, self.rate, self.loss = delay, jitter, rate, loss
        self.ports = [self.open_port(name) for name in names]
        self.known = {}  # hardware address: port
        self.free_at = [0.0] * len(names)
        self.waiting, self.order, self.forwarded, self.lost = [], 0, 0, 0
        self.draw = random.Random(7)
        self.wake_reader, self.wake_writer = os.pipe()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    @staticmethod
    def open_port(name):
        port = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(port, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
        return port

    def run(self):
        while True:
            timeout = max(0.0, self.waiting[0][0] - time.monotonic()) if self.waiting else None
            ready, _, _ = select.select([*self.ports, self.wake_reader], [], [], timeout)
            if self.wake_reader in ready:
                return
            for number, port in enumerate(self.ports):
                if port in ready:
                    self.take(number, port)
            while self.waiting and self.waiting[0][0] <= time.monotonic():
                _, _, number, frame = heapq.heappop(self.waiting)
                try:
                    os.write(self.ports[number], frame)
                    self.forwarded += 1
                except OSError:  # the other side is down or full: lost, as on a wire
                    self.lost += 1

    def take(self, number, port):
        for _ in range(64):
            try:
                frame = os.read(port, FRAME)
            except OSError:
                return
            self.known[frame[6:12]] = number
            if self.draw.random() < self.loss:
                self.lost += 1
                continue
            to = self.known.get(frame[0:6])  # broadcasts and strangers go everywhere
            for out in [to] if to is not None else [n for n in range(len(self.ports)) if n != number]:
                due = time.monotonic() + self.delay + self.draw.uniform(-self.jitter, self.jitter)
                if self.rate:
                    due = self.free_at[out] = max(due, self.free_at[out]) + len(frame) * 8 / self.rate
                self.order += 1
                heapq.heappush(self.waiting, (due, self.order, out, frame))

    def close(self):
        os.write(self.wake_writer, b"x")
        self.thread.join()
        for descriptor in (*self.ports, self.wake_reader, self.wake_writer):
            os.close(descriptor)
