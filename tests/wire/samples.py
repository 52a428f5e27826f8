"""One value of every struct that crosses a process boundary, with every field set to something else than its default,
and one with nothing but what must be given."""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.lora_request import LoRARequest
from quire.pooling_params import PoolingParams
from quire.sampling_params import RepetitionDetectionParams, RequestOutputKind, SamplingParams
from quire.structured_outputs import ReasoningTokens, StructuredOutputsParams
from quire.timeline import Stamp
from quire.wire.elastic import ReconfigureDistributedRequest
from quire.wire.engine_core import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    FinishReason,
    UtilityOutput,
)
from quire.wire.exchange import ExchangeHead
from quire.wire.execution import (
    CachedRequestData,
    DraftTokenIds,
    GrammarOutput,
    LogprobsLists,
    LogprobsTensors,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from quire.wire.group import (
    EpochEnd,
    GroupNetwork,
    GroupRefusal,
    GroupVerdict,
    GroupWelcome,
    HubLaunch,
    Ping,
    RankState,
    Standing,
    Verdict,
)
from quire.wire.handshake import (
    ClientAddresses,
    CoordinatorAddresses,
    CoordinatorLaunch,
    EngineHandshakeMetadata,
    EngineStatus,
    EngineZmqAddresses,
)
from quire.wire.kv_cache import (
    ChunkedSpec,
    ExtraKVCacheLayer,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    LatentSpec,
    SlidingWindowSpec,
)
from quire.wire.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch, KVEventSource
from quire.wire.kv_peers import (
    Bitmap,
    Block,
    Changes,
    Credit,
    Drop,
    Get,
    Gone,
    Have,
    Hello,
    Proof,
    Put,
    Refused,
    Release,
    Renew,
    Taken,
    Watch,
    Welcome,
)
from quire.wire.kv_transfer import (
    BlockKey,
    KVConnectorMetadata,
    KVConnectorOutput,
    LoadOrder,
    LoadResult,
    SavedBlock,
    SavedBlocks,
    SaveOrder,
    SaveResult,
)
from quire.wire.lora import AdapterInfo, AdapterLoad, RegisteredAdapter
from quire.wire.nodes import (
    CoreEnd,
    CoreOrder,
    CoreReport,
    HeadReport,
    NodeHello,
    NodeRefusal,
    NodeReport,
    NodeUnknown,
    NodeWelcome,
)
from quire.wire.peers import ApiLaunch, PeerMessage
from quire.wire.sockets import CurveKeys
from quire.wire.stats import (
    AdapterStats,
    BaseCacheStats,
    BlockMap,
    EngineSnapshot,
    KVCacheEvictionEvent,
    KVTransferStats,
    PrefillStats,
    PrefixCacheStats,
    RequestSnapshot,
    SchedulerStats,
    SpecDecodeMetrics,
    SpecDecodingStats,
)
from quire.wire.topology import Group, GroupKind, Topology
from quire.wire.trace import PhaseTrace, StepTrace, TraceWindow
from quire.wire.worker_calls import LateAnswer, TransferReport, WorkerCall, WorkerReply
from quire.wire.worker_link import (
    Abort,
    AnswerFrames,
    Beat,
    CallFrames,
    LateFrames,
    LinkEnd,
    StateFrames,
    WorkerGone,
    WorkerNetwork,
    WorkersHello,
    WorkersRefusal,
    WorkersWelcome,
)

CURVE_KEYS = CurveKeys(b"p" * 40, b"s" * 40, b"o" * 40, 5.0)
CORE_END = CoreEnd(2, "crash", "was killed by SIGSEGV", ["0_request"], True, True)
CORE_REPORT = CoreReport(1, 3, 4711, {"crash": 2}, CORE_END, "the budget is used up")
CORE_ORDER = CoreOrder(1, True, 3, 2, 100)
LORA = LoRARequest("adapter", 3, "adapters/three", "base", True, True)
ADAPTER = AdapterInfo(3, 2, "d1g357", 1 << 20, 16, [7, 8])
ADAPTER_STATS = AdapterStats({"loaded": 2}, [0.25], [0.5], 1, 1 << 20, {"ready": 1})
REPETITION = RepetitionDetectionParams(max_pattern_size=8, min_pattern_size=2, min_count=3)
STRUCTURED = StructuredOutputsParams(
    regex="[ab]",
    json_object=False,
    disable_any_whitespace=True,
    disable_additional_properties=True,
    whitespace_pattern=" ?",
    reasoning=ReasoningTokens(9, 8),
)
SAMPLING = SamplingParams(
    n=2,
    presence_penalty=0.5,
    frequency_penalty=-0.25,
    repetition_penalty=1.5,
    temperature=0.75,
    top_p=0.5,
    top_k=40,
    min_p=0.125,
    seed=7,
    stop=["\n\n", "ß"],
    stop_token_ids=[1, 300],
    ignore_eos=True,
    max_tokens=None,
    min_tokens=4,
    logprobs=5,
    prompt_logprobs=0,
    logprob_token_ids=[9],
    flat_logprobs=True,
    skip_special_tokens=False,
    spaces_between_special_tokens=False,
    include_stop_str_in_output=True,
    output_kind=RequestOutputKind.DELTA,
    stream_interval=3,
    skip_clone=True,
    logit_bias={5: -1.5},
    allowed_token_ids=[5, 6],
    bad_words=["no"],
    repetition_detection=REPETITION,
    skip_reading_prefix_cache=True,
    thinking_token_budget=9,
    reasoning_tokens=ReasoningTokens(7, 8),
    extra_args={"key": [1, "two", 3.5, None]},
    eos_token_id=2,
    bad_words_token_ids=[[10, 11]],
    structured_outputs=STRUCTURED,
)
UNTEXTED = SamplingParams(detokenize=False)
POOLING = PoolingParams(
    use_activation=False,
    dimensions=64,
    step_tag_id=4,
    returned_token_ids=[1],
    task="embed",
    skip_reading_prefix_cache=True,
    extra_kwargs={"a": 1},
    output_kind=RequestOutputKind.CUMULATIVE,
    segment_start=7,
)
SMALL_ARRAY = np.arange(6, dtype=np.float32).reshape(2, 3)
"""Travels inside the msgpack."""
LARGE_ARRAY = np.arange(200, dtype=np.int32).reshape(4, 50)
"""Travels in a frame of its own."""
LOGPROBS = LogprobsLists([[4, 5]], [[-0.5, -1.0]], [2])
PROMPT_LOGPROBS = LogprobsTensors(
    LARGE_ARRAY,
    np.linspace(-4, 0, 200, dtype=np.float32).reshape(4, 50),
    np.array([1, 2, 3, 4], dtype=np.int32),
)
PREFIX_STATS = PrefixCacheStats(True, 1, 20, 16, 2, 40, 32)
EVICTION = KVCacheEvictionEvent(1.5, 0.25, (0.5, 0.125))
SPEC_METRICS = SpecDecodeMetrics(3, 2, True)
SPEC_STATS = SpecDecodingStats(3, 2, 6, 4, [2, 1, 1], 1, 1, 9, {"budget": 3}, 0.25, False)
STEP_TRACE = StepTrace(1.5, 1.625, 2.5, 2.75, 3.0, 40, 3, 4, 5, 60)
PHASE_TRACE = PhaseTrace("0_request", "prefill", 1.5, 2.5, 32, 16, True)
PREFILL_STATS = PrefillStats(10, 4, 5, 1, {"disk": 1}, (1.5, 2.5))
TRANSFER_STATS = KVTransferStats(
    *(PREFIX_STATS, 4, {"ok": 1}, [0.5], 2, 3, {"pins": 1}, {"pinned": 7}, 8, 9, {"broken": 10}),
    *({"mac": 2}, 6, {"postponed": 2}, [0.25], 11, 9, {"disk": {"ok": 1}}, {"same": 1}),
    *(5, {"stored": 3}, 2),
)
SCHEDULER_STATS = SchedulerStats(
    *(3, 2, 1, 77, 5, 0.5, PREFIX_STATS, [EVICTION], SPEC_STATS, 130, 17, 40, 30, 29, 9, 60, 8, ADAPTER_STATS, 1),
    TRANSFER_STATS,
    6,
    0.75,
    12,
)
STORED = BlockStored(
    [7], 5, [1, 2], 2, 3, "GPU", "sql", [["sql"]], 1, "sliding_window", 64, "LOCAL", "shared", "session"
)
REMOVED = BlockRemoved([7], "GPU", 1, "LOCAL", "shared")
SOURCE = KVEventSource("tcp://*:5557", "ipc:///replay", "kv", "map")
EVENT = EngineCoreEvent(EngineCoreEventType.PREEMPTED, 12.5)
OUTPUT = EngineCoreOutput(
    "0_request",
    [8, 9],
    new_logprobs=LOGPROBS,
    new_prompt_logprobs_tensors=PROMPT_LOGPROBS,
    pooling_output=SMALL_ARRAY,
    finish_reason=FinishReason.ERROR,
    stop_reason="</s>",
    segment_finish_reason=FinishReason.LENGTH,
    events=[EVENT],
    prefill_stats=PREFILL_STATS,
    trace_headers={"traceparent": "00-1"},
    kv_transfer_params={"remote": [1, {"x": None}]},
    routed_experts=np.array([[1, 2]], dtype=np.uint8),
    num_nans_in_logits=1,
    error_message="it failed",
    error_type="ValidationError",
    spec_decode_metrics=SPEC_METRICS,
    adapter=ADAPTER,
)
ADDRESSES = EngineZmqAddresses(["ipc:///a"], ["ipc:///b"], "ipc:///c", "ipc:///d", "ipc:///e")
GROUP_NETWORK = GroupNetwork("tcp://a:1", "tcp://a:2", b"key", 2.5, b"machine", "tcp://b:3")
HUB_LAUNCH = HubLaunch(3, "tcp://a:4", "tcp://a:5", "tcp://a:1", CURVE_KEYS)
RANK_STATE = RankState(2, 3, Standing.MEMBER, 5, (True, False), 2**64 - 1, 8, 4, 6, b"machine", "tcp://b:3")
COORDINATOR_ADDRESSES = CoordinatorAddresses("ipc:///front", "ipc:///back", "ipc:///intake")
FULL_SPEC = FullAttentionSpec(16, 2, 64, "float32")
EXTRA_LAYER = ExtraKVCacheLayer("draft.layer.0", FULL_SPEC, 1)
NEW_REQUEST = NewRequestData(
    "r", [1, 2], ([3], [4, 5]), 1, UNTEXTED, POOLING, [6], LORA, [7, 8], "salt", SMALL_ARRAY, [True], 2, 1
)
CACHED = CachedRequestData(["r", "s"], [([1],), None], [16, 32], {"s": [7]})

BLOCK_MAP = BlockMap(8, 3, 2, 6, 2, b"\x01\x02\x00", b"\x00\x01\x01")
REQUEST_SNAPSHOT = RequestSnapshot(
    "0_request", "request", "preempted", 5, 7, 6, 4, 16, 1, -3, 1700000000.5, 2, b"\x01\x00\x00\x00", 2, "disk"
)
BLOCK_KEY = BlockKey(b"d" * 32, b"p" * 32, (1, 2), (("lora", "red", 1), ("cache_salt", b"s")))
LOAD_ORDER = LoadOrder(7, "disk", 3, [BLOCK_KEY], [[4], [0]], {"host": "h"})
SAVED_BLOCKS = SavedBlocks.of([SavedBlock(1, 5, BLOCK_KEY)])
TRANSFERS = KVConnectorMetadata([LOAD_ORDER], [SaveOrder(8, SAVED_BLOCKS, "lease")], [6], {"x": 1})
LOAD_RESULT = LoadResult(7, 1, "partial", 4096, 0.5, "mac", 3, 2, {"mac": 1})
SAVE_RESULT = SaveResult(8, 1, "failed", 4096, 0.5, "io", [2], 1)

TRANSFERRED = KVConnectorOutput([LOAD_RESULT], [SAVE_RESULT], {9: 2}, {"fingerprint": b"f"}, 1, 4, [(2, {"x": 1})])
FULL: dict[str, Any] = {
    "LoRARequest": LORA,
    "RepetitionDetectionParams": REPETITION,
    "SamplingParams": SAMPLING,
    "StructuredOutputsParams": STRUCTURED,
    "PoolingParams": POOLING,
    "EngineCoreRequest": EngineCoreRequest(
        "0_request",
        [1, 200, 70000],
        SAMPLING,
        POOLING,
        1700000000.5,
        lora_request=LORA,
        cache_salt="",
        data_parallel_rank=1,
        prompt_embeds=PROMPT_LOGPROBS.logprobs,
        mm_features=["feature"],
        client_index=1,
        current_wave=2,
        priority=-3,
        trace_headers={"traceparent": "00-1"},
        resumable=True,
        continues_session=True,
        external_req_id="request",
        output_token_ids=[5, 6],
        prompt_is_token_ids=[True, False, True],
        reasoning_ended=True,
        reasoning_parser_kwargs={"a": 1},
        prediction_token_ids=[7, 8],
        adapter=ADAPTER,
    ),
    "AdapterInfo": ADAPTER,
    "AdapterLoad": AdapterLoad(LORA, 2, "d1g357"),
    "RegisteredAdapter": RegisteredAdapter(LORA, 2, "d1g357", True),
    "AdapterStats": ADAPTER_STATS,
    "EngineCoreEvent": EVENT,
    "EngineCoreOutput": OUTPUT,
    "UtilityOutput": UtilityOutput(-5, "no", {"result": [1, 2.5, "x", None, True]}, "ServerError"),
    "EngineCoreOutputs": EngineCoreOutputs(
        1, [OUTPUT], SCHEDULER_STATS, 99.5, UtilityOutput(1, None, [True]), {"0_request"}, 3, 4, 2, 1234
    ),
    "EngineCoreReadyResponse": EngineCoreReadyResponse(
        4096,
        1000,
        16,
        15984,
        3.9,
        ("generate",),
        dp_stats_address="ipc:///s",
        engine_index=1,
        incarnation=2,
        peak_memory_bytes=1 << 30,
        stamps=[Stamp("imports", 10.5, 0.25)],
        next_sequence=58,
        kv_events=SOURCE,
        numerics_id="x86_64; native amx",
        experts_generation=3,
    ),
    "BlockStored": STORED,
    "BlockRemoved": REMOVED,
    "AllBlocksCleared": AllBlocksCleared(),
    "KVEventBatch": KVEventBatch(1.5, [STORED, REMOVED, AllBlocksCleared()], 1),
    "KVEventSource": SOURCE,
    "NewRequestData": NEW_REQUEST,
    "CachedRequestData": CACHED,
    "SchedulerOutput": SchedulerOutput(
        [NEW_REQUEST], CACHED, {"r": 2, "s": 1}, 3, {"s": [7]}, {"gone"}, {"preempted"}, True, True, TRANSFERS
    ),
    "BlockKey": BLOCK_KEY,
    "LoadOrder": LOAD_ORDER,
    "SavedBlocks": SAVED_BLOCKS,
    "SaveOrder": SaveOrder(8, SAVED_BLOCKS, "lease", {"x": 1}),
    "KVConnectorMetadata": TRANSFERS,
    "LoadResult": LOAD_RESULT,
    "SaveResult": SAVE_RESULT,
    "KVConnectorOutput": TRANSFERRED,
    "Hello": Hello(1, b"f" * 32, "D", b"n" * 32),
    "Proof": Proof(b"t" * 32),
    "Have": Have(3, [(0, b"d" * 32), (1, b"e" * 32)]),
    "Get": Get(4, "lease", [(0, b"d" * 32)], 9),
    "Credit": Credit(4, 2),
    "Renew": Renew(["lease"]),
    "Release": Release(["lease"]),
    "Put": Put(7),
    "Drop": Drop(7),
    "Watch": Watch((7, 9)),
    "Changes": Changes([(0, b"a" * 32)], [(1, b"b" * 32)], (8, 10), True, False),
    "Taken": Taken(7, "stored"),
    "Welcome": Welcome(1, "P", "start", b"n" * 32, b"t" * 32, True),
    "Refused": Refused("fingerprint"),
    "Bitmap": Bitmap(3, b"\x03"),
    "Block": Block(4, 5),
    "Gone": Gone(4, 5),
    "GrammarOutput": GrammarOutput(["r"], np.array([[-1, 3]], dtype=np.int32)),
    "LogprobsLists": LOGPROBS,
    "LogprobsTensors": PROMPT_LOGPROBS,
    "ModelRunnerOutput": ModelRunnerOutput(
        ["r"], [[5]], {"r": LOGPROBS}, {"r": PROMPT_LOGPROBS}, {"r": SMALL_ARRAY}, {"r": [1, 0]}
    ),
    "DraftTokenIds": DraftTokenIds(["r"], [[1, 2]], ["r"], 0.25, False),
    "EngineZmqAddresses": ADDRESSES,
    "ClientAddresses": ClientAddresses(1, "ipc:///a", "ipc:///b", True, "/loads"),
    "ApiLaunch": ApiLaunch(
        2,
        3,
        4711,
        b"\x81\xa1a\x01",
        b"\x81\xa1b\x02",
        (b"d" * 32,),
        b"s" * 32,
        1700000000,
        ClientAddresses(2, "ipc:///a", "ipc:///b", True, "/tmp/board"),
        7,
        8,
        ("http://0.0.0.0:8000", "http://127.0.0.1:8001"),
        "/tmp/counts",
        "/tmp/metrics",
        9,
    ),
    "PeerMessage": PeerMessage(5, "abort", -1, (["a"], True), {"b": 1}, "NotFoundError", "there is none"),
    "EngineStatus": EngineStatus("FAILED", False, True, 9, 4711, "ModelLoadError", "no such file", "abc"),
    "EngineHandshakeMetadata": EngineHandshakeMetadata(
        ADDRESSES,
        b"\x81\xa1a\x01",
        3,
        False,
        "/tmp/page",
        9,
        {"rank": 1},
        True,
        "/tmp/group",
        11,
        CURVE_KEYS,
        2,
        True,
        GROUP_NETWORK,
    ),
    "RankState": RANK_STATE,
    "GroupWelcome": GroupWelcome(4),
    "GroupRefusal": GroupRefusal("the weights differ"),
    "GroupVerdict": GroupVerdict(5, 2, Verdict.STOP, 4, 6, b"life-6", [[0, 1], [2]], "tcp://10.0.0.2:7"),
    "EpochEnd": EpochEnd(6),
    "Ping": Ping(),
    "GroupNetwork": GROUP_NETWORK,
    "HubLaunch": HUB_LAUNCH,
    "ReconfigureDistributedRequest": ReconfigureDistributedRequest(3, 1, -2, "10.0.0.1", 7, [8, 9], 10, 2, "/tmp/g.2"),
    "CoordinatorAddresses": COORDINATOR_ADDRESSES,
    "CoordinatorLaunch": CoordinatorLaunch(COORDINATOR_ADDRESSES, 2, 4711, CURVE_KEYS, HUB_LAUNCH),
    "FullAttentionSpec": FULL_SPEC,
    "ChunkedSpec": ChunkedSpec(16, 2, 64, "float16", 96),
    "LatentSpec": LatentSpec(16, 1, 576, "float32"),
    "SlidingWindowSpec": SlidingWindowSpec(16, 2, 64, "float16", 128),
    "KVCacheGroupSpec": KVCacheGroupSpec(["layer.0"], FULL_SPEC),
    "KVCacheTensor": KVCacheTensor(4096, ["layer.0", "layer.1"], [0, 256]),
    "ExtraKVCacheLayer": EXTRA_LAYER,
    "KVCacheConfig": KVCacheConfig(
        8, [KVCacheTensor(4096, ["layer.0"])], [KVCacheGroupSpec(["layer.0"], FULL_SPEC)], [EXTRA_LAYER]
    ),
    "Topology": Topology(2, 3, 4, 5, expert_parallel=True),
    "Group": Group(GroupKind.TENSOR, (4, 5), 1),
    "LateAnswer": LateAnswer(1, [b"reply", b"result"]),
    "TransferReport": TransferReport(1, TRANSFERRED),
    "WorkerCall": WorkerCall(7, "execute_model"),
    "WorkerReply": WorkerReply(7, "ModelLoadError", "it does not fit", is_fatal=True, is_echo=True),
    "CurveKeys": CURVE_KEYS,
    "NodeHello": NodeHello(3, 2, 4, 8, {"--dtype": "float32"}, "far", 123),
    "CoreEnd": CORE_END,
    "CoreReport": CORE_REPORT,
    "NodeReport": NodeReport([CORE_REPORT], True, True),
    "NodeRefusal": NodeRefusal("no"),
    "NodeWelcome": NodeWelcome([3, 4], 2048),
    "NodeUnknown": NodeUnknown(),
    "CoreOrder": CORE_ORDER,
    "HeadReport": HeadReport([CORE_ORDER], 2048, True, True, True),
    "WorkersHello": WorkersHello(3, 1, 2, {"--dtype": "float32"}, "far", b"program"),
    "WorkersRefusal": WorkersRefusal("no"),
    "WorkersWelcome": WorkersWelcome(b"config", b"session", [2, 2], 1),
    "CallFrames": CallFrames(),
    "AnswerFrames": AnswerFrames(1),
    "LateFrames": LateFrames(),
    "StateFrames": StateFrames(1),
    "Abort": Abort(),
    "WorkerGone": WorkerGone(1, "was killed by SIGSEGV", 2),
    "Beat": Beat(),
    "LinkEnd": LinkEnd(),
    "WorkerNetwork": WorkerNetwork("tcp://10.0.0.1:29502", b"key", b"session", [2, 2], 1, 5.0, 2),
    "ExchangeHead": ExchangeHead(b"session", 7, [3, 1]),
    "BaseCacheStats": BaseCacheStats(True, 1, 2, 3, 4, 5, 6),
    "PrefixCacheStats": PREFIX_STATS,
    "KVCacheEvictionEvent": EVICTION,
    "SpecDecodeMetrics": SPEC_METRICS,
    "SpecDecodingStats": SPEC_STATS,
    "PrefillStats": PREFILL_STATS,
    "SchedulerStats": SCHEDULER_STATS,
    "KVTransferStats": TRANSFER_STATS,
    "StepTrace": STEP_TRACE,
    "PhaseTrace": PHASE_TRACE,
    "TraceWindow": TraceWindow(1.0, 9.5, [STEP_TRACE], [PHASE_TRACE], 100),
    "BlockMap": BLOCK_MAP,
    "RequestSnapshot": REQUEST_SNAPSHOT,
    "EngineSnapshot": EngineSnapshot(
        99.5, 1700000000.5, 1, 2, 3, 4, 5, BLOCK_MAP, [REQUEST_SNAPSHOT], 6, {"pinned": 7}
    ),
}
"""Samples by class name."""
LEFT_AT_DEFAULT = {
    "SamplingParams": {"detokenize"},
    "StructuredOutputsParams": {"json", "choice", "grammar", "structural_tag"},
}
"""Fields that a full sample cannot set: stop strings need the text, and an output has one form."""

PLAIN: dict[str, Any] = {
    "SamplingParams": UNTEXTED,
    "PoolingParams": PoolingParams(),
    "EngineCoreRequest": EngineCoreRequest("0_request", [1, 2, 3], SamplingParams(), None, 1700000000.5),
    "EngineCoreOutput": EngineCoreOutput("0_request", [8]),
    "EngineCoreOutputs": EngineCoreOutputs(outputs=[EngineCoreOutput("0_request", [8])], timestamp=99.5),
    "UtilityOutput": UtilityOutput(1),
    "SchedulerOutput": SchedulerOutput(),
    "ModelRunnerOutput": ModelRunnerOutput(),
    "EngineStatus": EngineStatus("HELLO"),
    "EngineHandshakeMetadata": EngineHandshakeMetadata(EngineZmqAddresses(["i"], ["o"]), b""),
    "ABORT": ["0_request", "1_request"],
    "UTILITY": (0, 77, "reset_prefix_cache", (True,)),
}
"""With nothing set but what must be; and the two messages that are no struct."""

SAMPLES: dict[str, Any] = {f"{name}.full": value for name, value in FULL.items()} | {
    f"{name}.plain": value for name, value in PLAIN.items()
}
