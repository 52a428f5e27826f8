"""An engine core that steps together with others (`waves.py`): every step of one is a step of all.

The loop of `EngineCoreProc`, with two additions: after a step, or a dummy step, the engine waits until all have agreed
to go on; and while it waits it serves its queue, so that control calls are answered.

Where the engines share experts, each runs the model once between two agreements. If one of them ends, the others give
up the step that they are in, keep everything else, and compute it again when that one is back.
"""

from __future__ import annotations

import dataclasses
import hashlib
import queue
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from quire.config.engine import EngineConfig
from quire.config.parallel import ParallelConfig
from quire.engine.core import NOTHING_SHARED, StepResult
from quire.engine.dp_group import MAX_RANKS, Agreement, DPGroup
from quire.engine.elastic import ElasticEPScalingState, Resizing, ScalingEffect, Stage
from quire.engine.executor.abstract import Executor
from quire.engine.heartbeat import HeartbeatWriter
from quire.engine.net_group import NetGroup
from quire.engine.proc import EngineCoreProc
from quire.engine.request import Request
from quire.engine.waves import WaveEffect, WaveState, WaveTurn
from quire.errors import ClientError, ConfigError, ServerError
from quire.failpoints import failpoint
from quire.logger import init_logger
from quire.wire.elastic import EEP_NOTIFICATION_CALL_ID, EEPNotificationType, ReconfigureDistributedRequest
from quire.wire.engine_core import EngineCoreOutputs, EngineCoreRequestType, UtilityOutput
from quire.wire.group import GroupNetwork, Verdict, Vote
from quire.wire.handshake import COORDINATOR
from quire.wire.heartbeat import IDLE_STAMP_INTERVAL_S
from quire.wire.stats import SchedulerStats

logger = init_logger(__name__)

FIRST_WAIT_S, MAX_WAIT_S = 0.00005, 0.002
"""First and longest wait for the others before they are looked at again; each is half as long again as the last."""


def digest_of(*facts: object) -> int:
    """Returns a digest of 64 bits."""
    return int.from_bytes(hashlib.sha256(repr(facts).encode()).digest()[:8], "little")


def open_group(parallel: ParallelConfig, page: Path) -> DPGroup:
    """Returns the group of engines of one machine that share experts, which this one has not joined yet."""
    size, experts, generation = parallel.data_parallel_size, parallel.experts_file, parallel.experts_generation
    return DPGroup(page, parallel.engine_index, size, experts_file=experts, generation=generation)


class DPEngineCoreProc(EngineCoreProc):
    """An `EngineCoreProc` that belongs to a group. All methods belong to the loop's thread."""

    def __init__(
        self,
        config: EngineConfig,
        executor_class: type[Executor],
        log_stats: bool,
        *,
        group_file: Path | None = None,
        group_network: GroupNetwork | None = None,
        include_finished_set: bool = False,
        heartbeat: HeartbeatWriter | None = None,
    ) -> None:
        """Joins the group once everything else is ready: before that, the others do not wait for it. The group is in
        the page `group_file`, or on several machines, at the hub of `group_network`."""
        parallel = config.parallel_config
        self._group: DPGroup | NetGroup
        if group_network is not None:
            rank, size, file = parallel.engine_index, parallel.data_parallel_size, parallel.experts_file
            self._group = NetGroup(group_network, rank, size, file, self.wake)
        elif parallel.shares_experts:
            self._group = open_group(parallel, group_file or Path())
        else:
            self._group = DPGroup(group_file or Path(), parallel.engine_index, MAX_RANKS)
        self._newcomer: ElasticEPScalingState | None = None
        """State of an engine that is started for a group which does not compute yet."""
        if parallel.is_scale_up_launch:
            self._newcomer = ElasticEPScalingState("new", "up", Stage.PRE_KV_INIT)
        self._resizing: Resizing | None = None
        """The change of the number of engines that is under way, or was the last."""
        super().__init__(
            config, executor_class, log_stats, include_finished_set=include_finished_set, heartbeat=heartbeat
        )
        self._run_own_step, self.step_fn = self.step_fn, self._run_counted_step
        self._num_dummies = 0
        """Dummy steps since the last report."""
        self._epoch = 0
        """Epoch that the worker has joined."""
        if self._group.shares_experts:
            self.heartbeat.least_tokens = config.scheduler_config.max_num_batched_tokens or 0
            if group_network is not None:  # a step may last until the silence of another machine is noticed
                self.heartbeat.least_s = group_network.silence_s / 2
            self.lifecycle.before_update, self.lifecycle.on_update = self._leave_epoch, self._note_update
        self.ready_response = dataclasses.replace(self.ready_response, experts_generation=parallel.experts_generation)
        weights = digest_of(str(config.model_config.model_dir), self.lifecycle.get_weight_version())
        self.waves = WaveState(self._group.join(self._get_fingerprint(config), weights=weights))
        if self._newcomer is not None:
            self._newcomer = self._newcomer.on_join()
        self.lifecycle.on_pause = self._begin_pause
        self.lifecycle.on_resume = self._end_pause

    def _get_fingerprint(self, config: EngineConfig) -> int:
        """Returns a digest of what must be the same in all engines that share experts."""
        scheduler, placement = config.scheduler_config, config.parallel_config.expert_placement_strategy
        return digest_of(
            self.ready_response.numerics_id, scheduler.max_num_batched_tokens, scheduler.max_num_seqs, placement
        )

    # -- work ---------------------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        """Returns whether a call of the step would do anything, or the others wait for this engine."""
        return super().has_work() or (self.waves.is_running and (self.is_running or self._is_needed()))

    def _is_needed(self) -> bool:
        """Returns whether this engine, which has been asked to end, stays for the steps of the others: as long as they
        may have to finish their requests."""
        return self._group.shares_experts and not self._ends_now and time.monotonic() < self._drain_end

    def is_blocked(self) -> bool:
        return not self.waves.is_running and super().is_blocked()

    def _has_own_work(self) -> bool:
        return super().has_work() and not super().is_blocked()

    def _vote(self) -> Vote:
        """Returns this engine's part of the next agreement. Its requests do not keep it from going over to another
        group."""
        is_leaving = self._resizing is not None and self._resizing.is_leaving
        return self.waves.vote(self._has_own_work() and not is_leaving)

    def add_request(self, request: Request, wave: int = 0) -> None:
        super().add_request(request, wave)
        if self.scheduler.has_requests():
            self._take(self.waves.on_request(max(wave, self._group.wave)))

    def take_news(self) -> None:
        super().take_news()
        self._follow_resizing()
        if self._group.is_lost and not self.waves.is_paused:
            self._group.rejoin()
        if self._group.is_joining and (agreement := self._group.poll()) is not None:
            self._follow(agreement)  # it was admitted while it was idle

    def run_busy_loop(self) -> None:
        try:
            super().run_busy_loop()
        finally:
            self._group.leave()  # the way out may take a while, and the others wait for this engine's vote

    def _handle_shutdown(self) -> bool:
        goes_on = super()._handle_shutdown()
        if self._group.has_left:  # it was removed
            return False
        waits_for_others = self._group.shares_experts and self._group.is_joining
        if goes_on and waits_for_others and not self.is_running:  # a step would only forget what has ended
            return self.scheduler.has_unfinished_requests()
        return goes_on

    # -- steps --------------------------------------------------------------------------------------------------------

    def _process_engine_step(self) -> bool:
        if self._group.has_left:
            return False
        if not self.waves.is_running and self._has_own_work():  # a grammar is compiled, or the weights are back
            self._take(self.waves.on_request(self._group.wave))
        if self.waves.is_running and self._group.is_joining:
            self._agree()
            return False
        try:
            executed = super()._process_engine_step()
            if self.waves.is_running:
                self._take(self.waves.on_step(executed, self.lifecycle.is_sleeping()))
        except ServerError as e:
            if not self._group.is_lost:
                raise
            logger.warning("a step is computed again when all engines and their experts are there: %s", e)
            self.heartbeat.idle()
            if not self._follow_resizing():
                self._group.rejoin()
            return False
        if self.waves.is_running:
            self._agree()
        return executed

    def _agree(self) -> None:
        """Waits until all have agreed on what comes next, and follows that. Returns without it if the core ends, or has
        gone over to another group."""
        if self._follow_resizing():
            return
        group = self._group
        group.enter(self._vote())
        wait_s, stamped = FIRST_WAIT_S, time.monotonic()
        while (agreement := group.poll()) is None:
            if not self._handle_shutdown():
                return
            if group.is_lost:
                if self._follow_resizing():
                    return
                group.rejoin()
                group.enter(self._vote())
            self._check_threads()
            try:
                item = self.input_queue.get(timeout=wait_s)
            except queue.Empty:
                wait_s = min(1.5 * wait_s, MAX_WAIT_S)
            else:
                self._handle_client_request(*item)
                if self._group is not group:
                    return
                if group.is_joining:
                    group.enter(self._vote())
            if time.monotonic() - stamped > IDLE_STAMP_INTERVAL_S:
                self.heartbeat.idle()  # an engine that waits for another does not hang
                stamped = time.monotonic()
        self._follow(agreement)

    def _follow(self, agreement: Agreement) -> None:
        if self._group.shares_experts and self._group.epoch != self._epoch:
            self._epoch = self._group.epoch
            self._group.watch(self.wake)
            network = self._group.network
            self.executor.collective_rpc("join_engines", args=(self._epoch, *([] if network is None else [network])))
        self._take(self.waves.on_verdict(agreement.verdict, agreement.wave, self._has_own_work()))
        if agreement.verdict is not Verdict.GO:
            self._report_wave()
        has_switched = self._follow_resizing()
        if agreement.verdict is Verdict.PAUSE and not self.waves.is_paused and not has_switched:
            self._group.rejoin()  # it was resumed before it learnt of the pause

    def _take(self, turn: WaveTurn) -> None:
        """Takes over the state after an event, and carries out what it asks for."""
        self.waves = turn.state
        for effect in turn.effects:
            match effect:
                case WaveEffect.DUMMY:
                    self._run_dummy()
                case WaveEffect.START_OTHERS:
                    self.output_queue.put((COORDINATOR, EngineCoreOutputs(start_wave=self.waves.wave)))
                case WaveEffect.REPORT_END:
                    self.output_queue.put((COORDINATOR, EngineCoreOutputs(wave_complete=self.waves.wave - 1)))

    def _report_wave(self) -> None:
        """Sends statistics at the end of a wave: an engine that only ran dummy steps sends no others."""
        stats = self.scheduler.make_stats()
        if stats is not None:
            self._count(stats)
            self.output_queue.put((0, EngineCoreOutputs(scheduler_stats=stats)))

    def _run_counted_step(self) -> StepResult:
        outputs, executed = self._run_own_step()
        for batch in (outputs or {}).values():
            if batch.scheduler_stats is not None:
                self._count(batch.scheduler_stats)
        return outputs, executed

    def _count(self, stats: SchedulerStats) -> None:
        stats.current_wave, stats.step_counter = self.waves.wave, self.waves.step
        stats.num_dummy_batches, self._num_dummies = self._num_dummies, 0

    def _run_dummy(self) -> None:
        self.heartbeat.execute((), 1)
        self.executor.execute_dummy_batch()
        self.heartbeat.update()
        self._num_dummies += 1

    # -- control ------------------------------------------------------------------------------------------------------

    def _handle_client_request(self, request_type: EngineCoreRequestType, data: Any) -> None:
        if request_type is not EngineCoreRequestType.START_DP_WAVE:
            super()._handle_client_request(request_type, data)
        elif data is None:
            self._take(self.waves.on_coordinator())
        else:
            self._take(self.waves.on_start(data))

    # -- another number of engines ------------------------------------------------------------------------------------

    def _eep_scale_up_before_kv_init(self) -> None:
        if self.executor.config.cache_config.num_gpu_blocks_override is None:
            raise ConfigError("an engine that is added to others which share experts has their number of blocks")
        if self._newcomer is not None:
            self._newcomer = self._newcomer.on_kv_size()

    def reinitialize_distributed(self, request: ReconfigureDistributedRequest) -> Future[str]:
        group = self._group
        if not group.shares_experts:
            raise ClientError(NOTHING_SHARED)
        if isinstance(group, NetGroup):
            raise ClientError("engines that share experts on several machines keep their number")
        if self.lifecycle.is_sleeping():
            raise ClientError("this engine is asleep: call wake_up() before the number of engines is changed")
        self.discard_prepared_elastic_ep()
        experts: Future[None] | None = None
        if not Resizing.is_removal(request, group.rank, group.size):
            arguments = request.new_data_parallel_size, request.generation
            (experts,) = self.executor.collective_rpc("prepare_experts", args=arguments)
        self._resizing = Resizing(request, group.rank, group.size, experts)
        if experts is None:
            self.wake()
        else:
            experts.add_done_callback(lambda _: self.wake())
        return self._resizing.prepared

    def commit_prepared_elastic_ep(self) -> Future[None]:
        if self._resizing is None or not self._resizing.is_prepared:
            raise ClientError("no other number of engines has been prepared")
        self._resizing.is_ordered = True
        self.wake()
        return self._resizing.switched

    def discard_prepared_elastic_ep(self) -> None:
        if self._resizing is not None and not self._resizing.is_complete:
            self._resizing.discard()
            self.executor.collective_rpc("discard_experts")
        self._resizing = None

    def _follow_resizing(self) -> bool:
        """Does what a change of the number of engines asks for now. Called between two steps. Returns whether this
        engine has left its group."""
        if self._resizing is None or self._resizing.is_complete:
            return False
        is_at_rest = self.waves.is_paused or self._group.is_joining or self._group.is_lost
        for effect in self._resizing.progress(is_at_rest=is_at_rest):
            match effect:
                case ScalingEffect.PAUSE:
                    self._take(self.waves.on_pause())
                case ScalingEffect.SWITCH:
                    self._switch(self._resizing)
                case ScalingEffect.END:
                    self._group.leave()
                    self._eep_send_engine_core_notification(EEPNotificationType.SHUTDOWN_COMPLETE)
                    self._resizing.switched.set_result(None)
                    self.request_shutdown(now=True)
        return self._resizing.is_complete

    def _switch(self, resizing: Resizing) -> None:
        """Goes over to the next group. Requests and KV cache stay as they are."""
        failpoint("group.switch", str(self._group.rank))
        self.finish_steps()
        parallel = self.executor.config.parallel_config
        parallel = parallel.with_engines(resizing.request.new_data_parallel_size, resizing.request.generation)
        fingerprint, weights = self._group.fingerprint, self._group.weights
        self._group.leave()
        self.executor.collective_rpc("install_experts")
        self._group, self._epoch = open_group(parallel, Path(resizing.request.group_file)), 0
        wave = self._group.join(fingerprint, self.waves.wave, weights)
        self.waves = self.waves._replace(wave=max(wave, self.waves.wave), has_notified=False)
        self._take(self.waves.on_resume(self._has_own_work()))
        if self.lifecycle.is_scheduler_paused():
            self._take(self.waves.on_pause())
        self._eep_send_engine_core_notification(EEPNotificationType.RECONFIGURE_FINISHED)
        resizing.switched.set_result(None)

    def _eep_send_engine_core_notification(self, notification: EEPNotificationType) -> None:
        answer = UtilityOutput(EEP_NOTIFICATION_CALL_ID, result=[notification.value, self._group.rank])
        self._send_utility_output(0, answer)

    # -- new weights --------------------------------------------------------------------------------------------------

    def _leave_epoch(self) -> None:
        """Makes the others wait for this engine: none computes while weights differ."""
        if not self.waves.is_paused and not self._group.is_joining:
            self._group.rejoin()

    def _note_update(self, path: str, version: str) -> None:
        self._group.weights = digest_of(path, version)

    def _begin_pause(self) -> None:
        self._take(self.waves.on_pause())

    def _end_pause(self) -> None:
        if self.waves.is_paused:
            self._group.rejoin()
        self._take(self.waves.on_resume(self._has_own_work()))
