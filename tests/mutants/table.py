"""Guards at the heart, how each can be lost, and the test that notices.

A row that no longer fits the code is rewritten, not deleted: what it guards still has to hold.
"""

from typing import NamedTuple


class Mutant(NamedTuple):
    """One change to one file that must not go unnoticed."""

    file: str
    """Relative to the checkout."""
    old: str
    """Stands in the file exactly once."""
    new: str
    why: str
    """The harm that it does."""
    test: str
    """Its node id; it must fail, for one of its parameters at least."""


SERVER, SESSIONS, SAMPLES = "tests/unit/server", "tests/unit/sessions", "tests/unit/samples"
CONTROL, STORE = "tests/unit/control", "tests/unit/store"

MUTANTS = (
    # Rows beside tokens
    Mutant(
        "harness/sessions/continuation.py",
        "rows_from=None if self.rows is None else self.rows.stop",
        "rows_from=None if self.rows is None else 0",
        "full rows every turn: a later prefill replaces the experts that tokens were sampled with",
        f"{SESSIONS}/test_token_rows.py::test_every_row_of_every_sample_is_the_one_first_computed",
    ),
    # Retries and the lifecycle
    Mutant(
        "harness/sessions/retries.py",
        "(RetryStanding.UNDELIVERED, False): Treatment.REPLAY",
        "(RetryStanding.UNDELIVERED, False): Treatment.SAMPLE",
        "an answer that got lost on the way is sampled a second time",
        f"{SERVER}/test_retries.py::test_an_answer_that_nobody_read_is_replayed",
    ),
    Mutant(
        "harness/sessions/lifecycle.py",
        "    (Phase.CLOSING, Command.COMMIT): Phase.CLOSING,\n",
        "",
        "what was sampled before a drain cannot be recorded after it",
        f"{SESSIONS}/test_lifecycle.py::test_what_was_admitted_may_always_be_recorded",
    ),
    Mutant(
        "harness/turn_ends.py",
        "TurnEnd.DRAINED: EndRule(_ABORTED,",
        "TurnEnd.DRAINED: EndRule(_COMPLETED,",
        "half an answer is trained as a whole one",
        f"{SERVER}/test_turn_ends.py::test_answer_record_sample_metric_and_log_say_why_a_turn_ended",
    ),
    # An output of several requests
    Mutant(
        "harness/sessions/continuation.py",
        "start=span.start + start, end=span.end + start",
        "start=span.start, end=span.end",
        "tokens behind a joint have the versions of those before it",
        f"{SERVER}/test_scoring.py::test_a_turn_whose_client_left_keeps_the_scores_of_its_partial",
    ),
    Mutant(
        "harness/sessions/turn_outcome.py",
        "        turn = keep_scores(turn, prior)\n",
        "        pass\n",
        "a sweep's scores of a turn that continues are lost",
        f"{SERVER}/test_sweep.py::test_a_turn_that_goes_on_keeps_the_values_that_a_sweep_gave_its_first_part",
    ),
    Mutant(
        "harness/sessions/turn_outcome.py",
        "    if prior is not None and prior.is_suspended:\n",
        "    if prior is not None:\n",
        "tokens that were resampled have the scores of those that were lost",
        f"{SERVER}/test_sweep.py::test_a_turn_that_begins_again_has_no_values_of_tokens_that_were_lost",
    ),
    Mutant(
        "harness/server/generation.py",
        "            self._unsolicited_aborts = 0  # the new version explains the earlier cuts\n",
        "            pass\n",
        "weights that are updated behind our back end turns",
        f"{SERVER}/test_others_updates.py::test_aborts_that_new_weights_explain_later_never_end_a_turn",
    ),
    Mutant(
        "harness/server/generation.py",
        "            self._look_at_age()\n",
        "",
        "a turn continues although its tokens are older than the session allows",
        f"{SERVER}/test_others_updates.py::test_a_turn_that_is_cut_short_ends_when_its_tokens_are_too_old",
    ),
    # Limits
    Mutant(
        "harness/sessions/admission.py",
        "limits.tokens_per_session or context_length) - place.prompt_length",
        "limits.tokens_per_session or context_length)",
        "prompt and output together are longer than the context",
        f"{SESSIONS}/test_admission.py::test_limits_only_ever_shorten",
    ),
    # Durability
    Mutant(
        "harness/server/admitted.py",
        "                    await to_the_end(self._keep(turn, turn.outcome))\n",
        "                    asyncio.ensure_future(self._keep(turn, turn.outcome))\n",
        "a turn is answered before it is on the disk",
        f"{SERVER}/test_outcomes.py::test_a_turn_that_is_cancelled_is_on_disk_and_in_the_ledger",
    ),
    Mutant(
        "harness/server/admitted.py",
        "            outcome = lose_turn(outcome, _as_reason(error))\n",
        "",
        "a turn that the store refused is extended and trained",
        f"{SERVER}/test_outcomes.py::test_a_retry_that_takes_a_lost_turn_up_before_its_loser_is_told_has_it_to_itself",
    ),
    Mutant(
        "harness/server/store/writer.py",
        "                error = self._commit(group)\n",
        "                self._answer(group, None)\n                error = self._commit(group)\n",
        "a write is called durable before it is committed",
        f"{STORE}/test_sqlite.py::test_a_write_that_fails_is_an_error_for_who_waits_and_the_store_goes_on",
    ),
    # The gate and its leases
    Mutant(
        "harness/sessions/gate.py",
        "is_drain = HoldKind.DRAIN in (wanted.kind, mine and mine.kind)",
        "is_drain = wanted.kind is HoldKind.DRAIN",
        "a pause lets new turns in behind a drain",
        f"{SESSIONS}/test_gate.py::test_the_gate_is_shut_exactly_while_somebody_holds_it",
    ),
    Mutant(
        "harness/sessions/gate.py",
        "self._end(ended, left=[hold for hold in ended if hold.engines])",
        "self._end(ended, left=[])",
        "engines that a dead controller paused stay paused for ever",
        f"{SESSIONS}/test_gate.py::test_engines_are_left_when_their_hold_ends_and_nobody_says_that_they_go_on",
    ),
    # Abort and weights
    Mutant(
        "harness/rollouts/control/abort.py",
        "                await abort.drain()\n                await abort.abort_engines()\n",
        "                await abort.abort_engines()\n                await abort.drain()\n",
        "an agent continues from half an answer",
        f"{CONTROL}/test_abort.py::test_a_rollout_that_is_cut_short_leaves_partial_samples",
    ),
    Mutant(
        "harness/rollouts/control/abort.py",
        "await to_the_end(abort.leave_open())",
        "await abort.leave_open()",
        "an abort that is cancelled twice leaves gates shut",
        f"{CONTROL}/test_abort.py::test_cancelling_again_and_again_opens_the_gate_all_the_same",
    ),
    Mutant(
        "harness/rollouts/control/weights.py",
        "await to_the_end(update.reopen())",
        "await update.reopen()",
        "an update that is cancelled twice leaves engines paused",
        f"{CONTROL}/test_weights.py::test_a_cancelled_update_opens_everything_again",
    ),
    # Histories and branches
    Mutant(
        "harness/sessions/tree.py",
        "                if self._form.contradiction(ours, theirs) is not None:\n                    return None\n",
        "",
        "a client that edits its history continues in the branch that it has edited",
        f"{SESSIONS}/test_one_branch.py::test_an_edit_is_a_branch",
    ),
    Mutant(
        "harness/tokens/matching.py",
        "return sent_id == recorded_id or not _OUR_ID.fullmatch(sent_id)",
        "return True",
        "a client continues from another answer than the one whose calls it made",
        f"{SESSIONS}/test_one_branch.py::test_ids_of_calls_decide_between_two_that_fit",
    ),
    # Samples, masks and the ledger
    Mutant(
        "harness/samples/delivery.py",
        "end = len(completed) + 1",
        "end = len(path)",
        "what follows an answer that was cut short is trained",
        f"{SAMPLES}/test_samples.py::test_a_sample_ends_with_the_first_incomplete_turn",
    ),
    Mutant(
        "harness/samples/merge.py",
        "        masked.update(turn.index for turn in branch.kept)\n",
        "",
        "a turn that two branches share is trained twice",
        f"{SAMPLES}/test_samples.py::test_all_selects_every_branch_and_trains_a_shared_turn_once",
    ),
    Mutant(
        "harness/samples/delivery.py",
        "0 if turn in self._taken else self._trainable",
        "self._trainable",
        "a consumer that takes some samples trains what they share in each",
        f"{SAMPLES}/test_delivery.py::test_a_turn_that_samples_share_is_trained_in_the_first_that_is_taken",
    ),
    Mutant(
        "harness/sessions/ledger.py",
        "own = part.masked_from if plan.is_trained(turn) else 0",
        "own = part.masked_from",
        "the ledger calls trained what the masks leave out",
        f"{SAMPLES}/test_delivery.py::test_a_turn_that_is_not_trained_is_context_of_one_that_is",
    ),
    Mutant(
        "harness/samples/proximal.py",
        "is_next & (self.versions == self.behavior_versions)",
        "is_next",
        "a token is scored twice, and the second time under other weights",
        f"{SAMPLES}/test_proximal.py::test_a_partial_output_is_scored_before_it_is_a_turn",
    ),
    # Packs
    Mutant(
        "harness/samples/packing.py",
        "    if sizes.size <= FILL_UP_TO and",
        "    if False and",
        "a step needs more packs than its segments fill",
        f"{SAMPLES}/test_packing.py::test_pools_that_best_fit_packs_badly_are_packed_well",
    ),
)
