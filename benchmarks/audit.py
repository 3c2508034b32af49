#!/usr/bin/env python3
"""Speed of the audit beside its two yardsticks, in one run on one machine.

Headers: wall time of `dsv41-mpi --audit-only` on the complete sparse tree (warm page cache, best of several) against
json.loads alone on the same 48 headers and index, the text already in memory.
Payload: `--verify-payload` on one shard with real data against `dd iflag=direct` on the same file (dropped from the
page cache by reading it directly). Standard library only; the programs come from the release build.
"""

import argparse
import json
import os
import platform
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def best(times, repeat):
    return min(times() for _ in range(repeat))


def timed(command):
    start = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    seconds = time.perf_counter() - start
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}: exit {done.returncode}\n{done.stderr.decode()}")
    return seconds


def json_texts(directory):
    texts = [(directory / "model.safetensors.index.json").read_bytes()]
    for shard in sorted(directory.glob("*.safetensors")):
        with shard.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            texts.append(file.read(length))
    return texts


def headers(programs, config, tree, repeat):
    if not tree.exists():
        subprocess.run([programs / "dsv41-tree", "--config", config, "--out", tree], check=True)
    texts = json_texts(tree)

    def loads():
        start = time.perf_counter()
        for text in texts:
            json.loads(text)
        return time.perf_counter() - start

    audit = [programs / "dsv41-mpi", "--audit-only", "--model", tree, "--require-complete", "--quiet"]
    timed(audit)
    return {"json_bytes": sum(map(len, texts)), "json_loads_s": best(loads, repeat),
            "audit_s": best(lambda: timed(audit), repeat)}


def payload(programs, config, scratch, repeat, shard):
    tree = scratch / "payload"
    if not tree.exists():
        subprocess.run([programs / "dsv41-tree", "--config", config, "--out", tree, "--payload", "random",
                        "--shards", str(shard)], check=True)
    file = next(tree.glob("*.safetensors"))
    manifest = scratch / "manifest.jsonl"
    manifest.unlink(missing_ok=True)  # written each time anew by the first run, compared with by the others
    verify = [programs / "dsv41-mpi", "--audit-only", "--model", tree, "--quiet", "--verify-payload",
              "--manifest", manifest]
    os.sync()
    dd = [timed(["dd", f"if={file}", "of=/dev/null", "iflag=direct", "bs=16M"]) for _ in range(repeat)]
    own = [timed(verify) for _ in range(repeat)]
    size = file.stat().st_size
    return {"bytes": size, "dd_direct_s": min(dd), "verify_s": min(own), "dd_direct_gb_per_s": size / min(dd) / 1e9,
            "verify_gb_per_s": size / min(own) / 1e9, "share_of_dd": min(dd) / min(own)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, default=ROOT / "build/release/bin")
    parser.add_argument("--config", type=Path, default=ROOT / "tests/data/release/config.json")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--payload-shard", type=int, default=2, help="shard to fill with data (2: 1.3 GB); 0: headers only")
    parser.add_argument("--scratch", type=Path,
                        help="keep the trees there, as tree/ and payload/, and use them again (default: temporary ones)")
    parser.add_argument("--out", type=Path, help="write the result there as JSON")
    options = parser.parse_args()
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    model = [line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    result = {"date": time.strftime("%Y-%m-%d"), "commit": commit.stdout.strip(),
              "machine": f"{model[0] if model else platform.machine()}, {os.cpu_count()} cores",
              "load": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory() as folder:
        scratch = options.scratch or Path(folder)
        result["headers"] = headers(options.programs, options.config, scratch / "tree", options.repeat)
        if options.payload_shard:
            result["payload"] = payload(options.programs, options.config, scratch, 3, options.payload_shard)
    result["headers"]["times_faster"] = result["headers"]["json_loads_s"] / result["headers"]["audit_s"]
    text = json.dumps(result, indent=2) + "\n"
    print(text, end="")
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
