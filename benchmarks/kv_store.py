"""Measures the KV store: reading beside its ceilings, a first token after a restart, what storing costs, and blocks
taken from another engine.

    python -m benchmarks.kv_store [--dir DIRECTORY] [--model half] [--tokens 8192] [PART ...]

reading: GB/s of records into blocks, beside the file alone and the tags alone (goal: 85 % of the lower one).
codec: of the blocks of the demo model over a page of these docs: bytes as they are compressed, of those in memory, and
how many of these are compressed and decompressed in a second, by one thread.
restart: seconds to the first token of a long prompt: computed, and read by an engine that was killed and started again,
with the file pages in memory and dropped; how long the last block took to be stored.
cost: tokens per second of W2 and W4 with a store in which nothing is found, beside none, and processor time.
pd: seconds from the answer of an engine that prefills to the first token of one that decodes, over loopback (goal: 0.25
for 4,096 tokens of `half`), beside computing the prompt.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.models import find_checkpoint
from quire import LLM, SamplingParams
from quire.cli.bench.workloads import WORKLOADS, IdRange
from quire.kv_store.access import RecordBuffer, RecordReader, StoreWriter
from quire.kv_store.codec import compress, decompress
from quire.kv_store.directory import StoreDirectory
from quire.kv_store.extent import follow, open_extent, read_into
from quire.kv_store.record import TAG_BYTES, RecordHeader, RecordMac, make_header
from quire.worker.kv_transfer.transfers import BlockBytes

NUM_THREADS = 2
LAYERS, PIECE_BYTES = 24, 4096
"""A block of 16 tokens of `half`: keys and values of a layer are 4 KiB each."""
NUM_BLOCKS = 4096
STORE_BYTES = 8 << 30
MAX_MODEL_LEN = 16384
KV_CACHE_BYTES = 4 << 30
"""5 % of it may wait to be stored: more than the prompt of `restart`."""
STORED_S = 30.0
"""Time to wait for all blocks of a prompt."""


# -- reading -------------------------------------------------------------------------------------------------------


def in_threads(task: Callable[[int], None], num_items: int, num_threads: int = NUM_THREADS) -> float:
    """Returns the seconds in which `task` is done for each item, shared among threads."""
    items = iter(range(num_items))
    lock = threading.Lock()

    def run() -> None:
        while True:
            with lock:
                item = next(items, None)
            if item is None:
                return
            task(item)

    threads = [threading.Thread(target=run) for _ in range(num_threads)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


def drop_pages(directory: Path) -> None:
    """Writes the extents to the disk and drops their pages from memory."""
    for path in directory.glob("*.kvx"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def measure_reading(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    store = StoreDirectory.open(directory, STORE_BYTES)
    writer, mac = StoreWriter(store), RecordMac(store.key)
    memory = np.random.default_rng(0).integers(0, 255, (2 * LAYERS, NUM_BLOCKS, PIECE_BYTES), dtype=np.uint8)
    headers, places = [], []
    size = 2 * LAYERS * PIECE_BYTES

    def header_of(block: int) -> RecordHeader:
        return make_header(bytes(32), block.to_bytes(32, "little"), None, 0, range(16), size)

    start = time.perf_counter()
    for block in range(NUM_BLOCKS):
        header = header_of(block)
        assert not writer.append(header, [part[block].data for part in memory])
        extent = writer._extent
        assert extent is not None
        headers.append(header.encode())
        places.append((extent.name, extent.num_bytes - header.record_bytes))
    num_bytes = NUM_BLOCKS * size
    print(f"writing: {num_bytes / (time.perf_counter() - start) / 1e9:.2f} GB/s")
    files = {name: os.open(directory / name, os.O_RDONLY) for name, _ in places}

    local = threading.local()

    def buffer() -> RecordBuffer:
        if not hasattr(local, "buffer"):
            local.buffer = RecordBuffer()
        return local.buffer

    def read_alone(block: int) -> None:
        record = buffer().take(len(headers[block]) + TAG_BYTES + size)
        read_into(files[places[block][0]], [record], places[block][1])

    def tag_alone(block: int) -> None:
        mac.tag(headers[block], [buffer().take(size)])

    reader, blocks = RecordReader(store, mac), BlockBytes([list(memory)])

    def read_record(block: int) -> None:
        start = reader.read(*places[block], header_of(block), buffer())
        buffer().copy_to(start, blocks.pieces(0, block))

    print("| | file alone | tags alone | records | of the lower |\n|---|--:|--:|--:|--:|")
    for name, prepare in (("in the page cache", lambda path: None), ("dropped from it", drop_pages)):
        rows = []
        for _ in range(3):
            prepare(directory)
            alone = num_bytes / in_threads(read_alone, NUM_BLOCKS)
            tags = num_bytes / in_threads(tag_alone, NUM_BLOCKS)
            prepare(directory)
            both = num_bytes / in_threads(read_record, NUM_BLOCKS)
            rows.append((alone, tags, both))
        alone, tags, both = (statistics.median(column) / 1e9 for column in zip(*rows, strict=True))
        print(f"| {name} | {alone:.2f} | {tags:.2f} | {both:.2f} GB/s | {both / min(alone, tags):.0%} |")
    reader.close()
    shutil.rmtree(directory)


# -- codec ---------------------------------------------------------------------------------------------------------


def measure_codec(directory: Path) -> None:
    text = (Path(__file__).parents[1] / "docs" / "kv_store.md").read_text(encoding="utf-8")
    print("| type | share | compressed | decompressed |\n|---|--:|--:|--:|")
    for dtype, element_bytes in (("bfloat16", 2), ("float32", 4)):
        shutil.rmtree(directory, ignore_errors=True)
        with LLM("demo", dtype=dtype, kv_store=str(directory), kv_store_size=STORE_BYTES) as llm:
            llm.generate(text[:4000], SamplingParams(max_tokens=1), use_tqdm=False)
        payloads = [memoryview(payload) for payload in read_payloads(directory)]
        num_bytes, rows = sum(map(len, payloads)), []
        for _ in range(5):
            start = time.perf_counter()
            stored = [compress(payload, element_bytes) or b"" for payload in payloads]
            compressed = time.perf_counter()
            read = [decompress(memoryview(one), len(payloads[0])) for one in stored]
            rows.append((num_bytes / (compressed - start), num_bytes / (time.perf_counter() - compressed)))
            assert list(map(bytes, read)) == list(map(bytes, payloads))
        rates = [statistics.median(column) / 1e6 for column in zip(*rows, strict=True)]
        print(f"| {dtype} | {sum(map(len, stored)) / num_bytes:.1%} | {rates[0]:.0f} MB/s | {rates[1]:.0f} MB/s |")
    shutil.rmtree(directory)


def read_payloads(directory: Path) -> list[bytes]:
    store, payloads = StoreDirectory.open(directory, STORE_BYTES), []
    for file in store.list_extents():
        descriptor, table = open_extent(store.descriptor, file.name), store.load_table(file)
        assert table is not None
        payloads += [os.pread(descriptor, e.stored_bytes, e.offset + e.head_bytes) for e in table.entries]
        os.close(descriptor)
    store.close()
    return payloads


# -- restart -------------------------------------------------------------------------------------------------------


def make_llm(model: Path, directory: Path | None, max_num_seqs: int = 8, **options: Any) -> LLM:
    store = {} if directory is None else {"kv_store": str(directory), "kv_store_size": STORE_BYTES}
    return LLM(
        str(model),
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        max_num_seqs=max_num_seqs,
        skip_tokenizer_init=True,
        **{"max_model_len": MAX_MODEL_LEN, **store, **options},
    )


def make_prompt(num_tokens: int, seed: int) -> dict[str, list[int]]:
    rng = random.Random(seed)
    return {"prompt_token_ids": [rng.randrange(300, 8000) for _ in range(num_tokens)]}


def time_first_token(llm: LLM, num_tokens: int, seed: int) -> tuple[float, list[int], int]:
    """Returns seconds, the first tokens, and how many tokens of the prompt were cached."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    (output,) = llm.generate([make_prompt(num_tokens, seed)], params, use_tqdm=False)
    seconds = time.perf_counter() - start
    return seconds, list(output.outputs[0].token_ids), output.num_cached_tokens or 0


def count_records(directory: Path) -> int:
    store, total = StoreDirectory.open(directory, STORE_BYTES), 0
    for extent in store.list_extents():
        descriptor = open_extent(store.descriptor, extent.name)
        total += sum(1 for _ in follow(descriptor, 0, bytes.fromhex(extent.namespace)))
        os.close(descriptor)
    store.close()
    return total


def serve_once(model: Path, directory: Path, num_tokens: int, awaited_blocks: int) -> None:
    """Is the body of a process of its own: answers, waits until the blocks are stored, and is killed."""
    llm = make_llm(model, directory)
    time_first_token(llm, 64, seed=99)  # the first request of a process pays for more than its prompt
    seconds, tokens, cached = time_first_token(llm, num_tokens, seed=1)
    start = time.perf_counter()
    while count_records(directory) < awaited_blocks and time.perf_counter() - start < STORED_S:
        time.sleep(0.01)
    print(seconds, tokens[0], cached, time.perf_counter() - start, flush=True)
    signal.pause()


def run_once(model: Path, directory: Path, num_tokens: int, awaited_blocks: int) -> list[float]:
    command = [sys.executable, "-m", "benchmarks.kv_store", "--model", str(model), "--dir", str(directory)]
    command += ["--tokens", str(num_tokens), "--serve-once", str(awaited_blocks)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    os.killpg(process.pid, signal.SIGKILL)  # the engine core's process, too
    process.wait()
    return [float(word) for word in line.split()]


def measure_restart(model: Path, directory: Path, num_tokens: int) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    num_blocks = num_tokens // 16 - 1
    # Nothing is stored until the weights' files have been hashed, at the first start with a directory.
    run_once(model, directory, 64, 1)
    computed, token, _, lag = run_once(model, directory, num_tokens, num_blocks)
    rows = [("computed", computed, token, 0.0)]
    for name, prepare in (("killed, started again", lambda path: None), ("and file pages dropped", drop_pages)):
        prepare(directory)
        seconds, token, cached, _ = run_once(model, directory, num_tokens, num_blocks)
        rows.append((name, seconds, token, cached))
    print(f"| {num_tokens} tokens | first token after | of the prompt read |\n|---|--:|--:|")
    for name, seconds, _, cached in rows:
        print(f"| {name} | {seconds:.3f} s | {cached:.0f} |")
    assert len({token for _, _, token, _ in rows}) == 1, "the first tokens differ"
    print(f"the last block was stored {lag:.2f} s after the first token at most")
    shutil.rmtree(directory)


# -- cost ----------------------------------------------------------------------------------------------------------


REQUESTS_PER_RUN = {"W2": 8, "W4": 64}
DRAIN_S = 0.3
"""Time after a run in which its saves end, so that the next run does not pay for them."""


def measure_cost(model: Path, directory: Path, seconds: float) -> None:
    """Short runs of a workload with the store and without, in the order without, with, with, without, so that a machine
    that becomes slower or faster changes both alike. Each four give one ratio."""
    print(f"| {model.name} | fours | tokens/s | processor time of the core |\n|---|--:|--:|--:|", flush=True)
    for name, num_requests in REQUESTS_PER_RUN.items():
        shutil.rmtree(directory, ignore_errors=True)
        llms = [make_llm(model, each, num_requests, max_model_len=4096) for each in (None, directory)]
        runs, rates, times = itertools.count(), list[float](), list[float]()
        for llm in llms:
            time_run(llm, name, next(runs))
        end = time.monotonic() + seconds / len(REQUESTS_PER_RUN)
        while time.monotonic() < end:
            of_four = [time_run(llms[i], name, next(runs)) for i in (0, 1, 1, 0)]
            (wall_a, cpu_a), (wall_b, cpu_b), (wall_c, cpu_c), (wall_d, cpu_d) = of_four
            rates.append((wall_a + wall_d) / (wall_b + wall_c))
            times.append((cpu_b + cpu_c) / (cpu_a + cpu_d))
        for llm in llms:
            llm.shutdown()
        print(f"| {name} | {len(rates)} | {describe_median(rates)} | {describe_median(times)} |", flush=True)
        shutil.rmtree(directory)


def time_run(llm: LLM, workload: str, rep: int) -> tuple[float, float]:
    """Returns the seconds of a run, and the processor seconds of the core until its saves have ended."""
    requests = WORKLOADS[workload].make(rep, IdRange(), REQUESTS_PER_RUN[workload])
    params = [
        SamplingParams(temperature=0.0, max_tokens=request.output_len, ignore_eos=True, detokenize=False)
        for request in requests
    ]
    used, start = read_processor_time(llm), time.perf_counter()
    prompts: Any = [{"prompt_token_ids": request.prompt_token_ids} for request in requests]
    llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    time.sleep(DRAIN_S)
    return seconds, read_processor_time(llm) - used


def read_processor_time(llm: LLM) -> float:
    """Returns the seconds that all threads of the core's process have run."""
    client: Any = llm.llm_engine.engine_core
    tasks = Path(f"/proc/{client.core_pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def describe_median(ratios: list[float]) -> str:
    """Returns the median and the interval that holds the true one in 95 of 100 cases, by ranks."""
    ratios, number = sorted(ratios), len(ratios)
    rank = max(0, int((number - 1.96 * number**0.5) / 2))
    return f"{statistics.median(ratios):.1%} ({ratios[rank]:.1%} to {ratios[-1 - rank]:.1%})"


# -- prefill and decode apart --------------------------------------------------------------------------------------


def measure_apart(model: Path, directory: Path, num_tokens: int, num_rounds: int = 5) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    transfer: dict[str, Any] = {"kv_connector": "PeerConnector", "kv_role": "kv_both"}
    transfer["kv_connector_extra_config"] = {"path": str(directory)}
    prefill, decode = (make_llm(model, None, kv_transfer_config=transfer) for _ in range(2))
    seconds: dict[str, list[float]] = {"prefill": [], "decode": []}
    for number in range(num_rounds + 1):  # the first round measures how fast blocks come
        seed = 100 + number
        computed, tokens, _, params = time_transfer(prefill, num_tokens, seed, {"do_remote_decode": True})
        taken, same_tokens, cached, _ = time_transfer(decode, num_tokens, seed, params)
        assert tokens == same_tokens, "the first tokens differ"
        assert cached == (num_tokens - 1) // 16 * 16, f"only {cached} tokens were taken"
        seconds["prefill"].append(computed)
        seconds["decode"].append(taken)
    for llm in (prefill, decode):
        llm.shutdown()
    computed, taken = (statistics.median(seconds[name][1:]) for name in ("prefill", "decode"))
    print(f"{num_tokens} tokens: computed in {computed:.3f} s; then the other engine's first token after {taken:.3f} s")
    print("all rounds: " + " ".join(f"{value:.3f}" for value in seconds["decode"]))
    shutil.rmtree(directory)


def time_transfer(
    llm: LLM, num_tokens: int, seed: int, transfer: dict[str, Any] | None
) -> tuple[float, list[int], int, dict[str, Any] | None]:
    """Returns seconds, the first token, how many tokens of the prompt were cached, and the kv_transfer_params."""
    params = SamplingParams(
        temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False, extra_args={"kv_transfer_params": transfer}
    )
    start = time.perf_counter()
    (output,) = llm.generate([make_prompt(num_tokens, seed)], params, use_tqdm=False)
    seconds = time.perf_counter() - start
    return seconds, list(output.outputs[0].token_ids), output.num_cached_tokens or 0, output.kv_transfer_params


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["reading", "restart", "cost"])
    parser.add_argument("--dir", type=Path, default=Path("kv-store-benchmark"))
    parser.add_argument("--model", default="half")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--seconds", type=float, default=150.0, help="time of cost")
    parser.add_argument("--serve-once", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve_once is not None:
        serve_once(find_checkpoint(args.model), args.dir, args.tokens, args.serve_once)
        return
    if "reading" in args.parts:
        measure_reading(args.dir)
    if "codec" in args.parts:
        measure_codec(args.dir)
    if not set(args.parts) - {"reading", "codec"}:
        return
    model = find_checkpoint(args.model)
    if "restart" in args.parts:
        measure_restart(model, args.dir, args.tokens)
    if "cost" in args.parts:
        measure_cost(model, args.dir, args.seconds)
    if "pd" in args.parts:
        measure_apart(model, args.dir, args.tokens)


if __name__ == "__main__":
    main()
