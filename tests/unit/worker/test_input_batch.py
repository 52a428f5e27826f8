"""The batch against a dictionary that does the same, under random adding, removing, growing and sampling."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quire.sampling_params import SamplingParams
from quire.wire.execution import NewRequestData
from quire.worker.input_batch import BlockTable, InputBatch, make_step_inputs
from tests.seeds import examples

MAX_LEN, BLOCK_SIZES, CAPACITY = 32, [4, 8], 5
CPU = torch.device("cpu")
TOKENS = st.lists(st.integers(0, 99), min_size=1, max_size=12)


class BatchMachine(RuleBasedStateMachine):
    """Each request of `known`: prompt, outputs, blocks per group, computed tokens, parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = InputBatch(CAPACITY, MAX_LEN, BLOCK_SIZES)
        self.known: dict[str, dict] = {}
        self.count = 0
        self.next_block = 1

    def new_blocks(self, request: dict) -> tuple[list[int], ...]:
        """Fresh ids, enough for one more token than the request holds."""
        new = []
        for held, size in zip(request["blocks"], BLOCK_SIZES, strict=True):
            tokens = min(MAX_LEN, len(request["prompt"]) + len(request["outputs"]) + 1)
            needed = -(-tokens // size) - len(held)
            new.append(list(range(self.next_block, self.next_block + needed)))
            self.next_block += needed
            held += new[-1]
        return tuple(new)

    @precondition(lambda self: len(self.known) < CAPACITY)
    @rule(prompt=TOKENS, outputs=TOKENS | st.just([]), penalty=st.booleans(), top_k=st.integers(0, 50))
    def add(self, prompt: list[int], outputs: list[int], penalty: bool, top_k: int) -> None:
        self.count += 1
        request = {
            "prompt": prompt,
            "outputs": list(outputs),
            "blocks": ([], []),
            "computed": 0,
            "params": SamplingParams(
                top_k=top_k, seed=self.count, presence_penalty=0.5 if penalty else 0.0, repetition_penalty=1.2
            )
            if penalty
            else SamplingParams(top_k=top_k, seed=self.count),
        }
        self.known[f"r{self.count}"] = request
        blocks = self.new_blocks(request)
        self.batch.add_request(NewRequestData(f"r{self.count}", prompt, blocks, 0, request["params"], None, outputs))

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        req_id = data.draw(st.sampled_from(sorted(self.known)))
        del self.known[req_id]
        self.batch.remove_request(req_id)
        self.batch.remove_request(req_id)  # a second time does nothing

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def sample(self, data: st.DataObject) -> None:
        growing = [r for r, q in self.known.items() if len(q["prompt"]) + len(q["outputs"]) < MAX_LEN]
        if not growing:
            return
        chosen = data.draw(st.lists(st.sampled_from(sorted(growing)), unique=True, min_size=1))
        rows = np.array(sorted(self.batch.rows[r] for r in chosen))
        tokens = np.array(data.draw(st.lists(st.integers(0, 99), min_size=len(rows), max_size=len(rows))))
        for row, token in zip(rows, tokens, strict=True):
            request = self.known[self.batch.req_ids[row]]
            request["outputs"].append(int(token))
            self.batch.append_blocks(int(row), self.new_blocks(request))
        self.batch.append_tokens(rows, tokens)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def lay_out_a_step(self, data: st.DataObject) -> None:
        """Flat inputs equal a loop over requests and tokens."""
        scheduled = {}
        for req_id, request in self.known.items():
            total = len(request["prompt"]) + len(request["outputs"])
            request["computed"] = data.draw(st.integers(0, total - 1))
            self.batch.num_computed_tokens[self.batch.rows[req_id]] = request["computed"]
            scheduled[req_id] = data.draw(st.integers(0, total - request["computed"]))
        scheduled = {req_id: n for req_id, n in scheduled.items() if n}
        if not scheduled:
            return
        inputs = make_step_inputs(self.batch, scheduled, CPU)
        ids, positions, slots, sampling, lasts = [], [], [[], []], [], []
        for row, req_id in enumerate(self.batch.req_ids):
            if req_id not in scheduled:
                continue
            request = self.known[req_id]
            tokens = request["prompt"] + request["outputs"]
            end = request["computed"] + scheduled[req_id]
            for position in range(request["computed"], end):
                ids.append(tokens[position])
                positions.append(position)
                for group, size in enumerate(BLOCK_SIZES):
                    slots[group].append(request["blocks"][group][position // size] * size + position % size)
            if end == len(tokens):
                sampling.append(row)
                lasts.append(len(ids) - 1)
        assert inputs.input_ids.tolist() == ids
        assert inputs.positions.tolist() == positions
        assert inputs.rows[inputs.sampling].tolist() == sampling
        assert inputs.logits_indices.tolist() == lasts
        for group, attention in enumerate(inputs.attention):
            assert attention.slot_mapping.tolist() == slots[group]
            for i, row in enumerate(inputs.rows):
                blocks = self.known[self.batch.req_ids[row]]["blocks"][group]
                assert attention.block_table[i, : len(blocks)].tolist() == blocks

    @invariant()
    def rows_are_dense_and_right(self) -> None:
        batch = self.batch
        assert sorted(batch.req_ids) == sorted(self.known)
        assert batch.rows == {req_id: row for row, req_id in enumerate(batch.req_ids)}
        rows = np.arange(batch.num_reqs)
        rules = batch.sampling.select(rows, CPU).rules
        for row, req_id in enumerate(batch.req_ids):
            request = self.known[req_id]
            tokens = request["prompt"] + request["outputs"]
            assert batch.token_ids[row, : batch.num_tokens[row]].tolist() == tokens
            assert batch.num_computed_tokens[row] == request["computed"]
            assert batch.output_lens(rows)[row] == len(request["outputs"])
            assert rules is not None
            assert rules.seeds[row] == request["params"].seed
            if request["params"].presence_penalty:
                assert batch.sampling.histories[row].output_token_ids == request["outputs"]
            else:
                assert row not in batch.sampling.histories


BatchMachine.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=30)
TestBatch = BatchMachine.TestCase


def test_the_version_changes_when_a_row_gets_another_request() -> None:
    batch = InputBatch(4, 16, [4])
    seen = [batch.version]
    for step in (
        lambda: batch.add_request(NewRequestData("a", [1, 2], ([1],), 0, SamplingParams())),
        lambda: batch.add_request(NewRequestData("b", [1, 2], ([2],), 0, SamplingParams())),
        lambda: batch.remove_request("a"),
    ):
        step()
        seen.append(batch.version)
    batch.append_tokens(np.array([0]), np.array([5]))
    batch.remove_request("unknown")
    assert len(set(seen)) == 4
    assert batch.version == seen[-1]


def test_tokens_that_were_not_sampled_here() -> None:
    batch = InputBatch(2, 16, [4])
    batch.add_request(NewRequestData("a", [1], ([1],), 0, SamplingParams()))
    batch.add_request(NewRequestData("b", [7, 7], ([2],), 0, SamplingParams(presence_penalty=1.0)))
    for row, start in ((0, 1), (1, 2)):
        batch.extend_tokens(row, [8, 9])
        assert batch.token_ids[row, start : start + 2].tolist() == [8, 9]
    assert batch.num_tokens.tolist() == [3, 4]
    assert batch.output_lens(np.array([0, 1])).tolist() == [2, 2]
    assert batch.sampling.histories[1].output_token_ids == [8, 9]


def test_outputs_that_are_not_computed_complete_what_is_known() -> None:
    """They begin at the first that is not computed: the batch may have it, and may lack drafts that were accepted."""
    batch = InputBatch(CAPACITY, MAX_LEN, BLOCK_SIZES)
    batch.add_request(NewRequestData("a", [1, 2, 3], ([1], [1]), 0))
    batch.complete_tokens(0, [4])
    batch.num_computed_tokens[0] = 3
    batch.complete_tokens(0, [4, 5])
    assert batch.token_ids[0, : batch.num_tokens[0]].tolist() == [1, 2, 3, 4, 5]
    batch.write_drafts({"a": [6, 7, 8]})
    batch.num_computed_tokens[0] = 7  # two drafts are right
    batch.complete_tokens(0, [9])
    assert batch.token_ids[0, : batch.num_tokens[0]].tolist() == [1, 2, 3, 4, 5, 6, 7, 9]


def test_more_requests_than_rows_are_a_bug_of_the_scheduler() -> None:
    batch = InputBatch(1, 16, [4])
    batch.add_request(NewRequestData("a", [1], ([1],), 0, SamplingParams()))
    with pytest.raises(AssertionError, match="max_num_seqs=1"):
        batch.add_request(NewRequestData("b", [1], ([2],), 0, SamplingParams()))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_is_reserved_not_taken() -> None:
    """256 requests of a million tokens are 1 GiB of address space; only what is written becomes memory. Memory that
    earlier tests have freed serves arrays below 32 MiB only."""
    before = resident_bytes()
    batch = InputBatch(256, 1 << 20, [16])
    batch.add_request(NewRequestData("a", list(range(1000)), (list(range(63)),), 0, SamplingParams()))
    assert resident_bytes() - before < 32 << 20


def test_block_table_rows_are_views_when_they_can_be() -> None:
    table = BlockTable(4, 3, 16)
    for row, ids in enumerate(([1, 2], [3], [4, 5, 6])):
        table.set_row(row, ids)
    assert table.rows(np.array([0, 1]), CPU).tolist() == [[1, 2], [3, 0]]
    assert table.rows(np.array([0, 2]), CPU).tolist() == [[1, 2, 0], [4, 5, 6]]
    table.set_row(2, [7])
    assert table.rows(np.array([2]), CPU).tolist() == [[7]]
    assert table.slots(np.array([0, 2]), np.array([5, 3])).tolist() == [9, 31]
