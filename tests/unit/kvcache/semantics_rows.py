"""Which test shows which row of the reference specification (`kvcache-semantics.md`), or why none does.

Rows: S1..S15 the scenarios of section 5 in their order, D1..D6 its points on the two sides, A and B the cases of
sections 10 and 11, F1..F25 the features of section 14 in their order. A test is named by its file below `tests/` and
its function; `Overridden` names the decision of the design (section 6) that replaces the row.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ROWS", "Overridden"]


@dataclass(frozen=True)
class Overridden:
    """The row does not hold here: which decision replaces it, and the tests that show what holds instead."""

    decision: str
    tests: tuple[str, ...]


CONVERSATIONS = "unit/kvcache/test_conversations.py::"
CONFIG = "unit/kvcache/test_config.py::"
LIFE = "unit/kvcache/test_life_cycles.py::"
OPS = "unit/kvcache/test_operations.py::"
OTHER = "unit/kvcache/test_other_models.py::"
REFERENCE = "unit/kvcache/test_reference_cases.py::"
REUSE = "unit/kvcache/test_reuse.py::"
STATS = "unit/kvcache/test_stats.py::"
TIERS = "unit/kvcache/test_tiers.py::"
EVENTS = "unit/kvcache/test_events_and_provenance.py::"

S: dict[str, tuple[str, ...] | Overridden] = {
    "S1": (LIFE + "test_linear", REUSE + "test_linear_chat_reuses_each_previous_end"),
    "S2": (LIFE + "test_rewind", REUSE + "test_rewind_on_full_attention_reuses_every_end"),
    "S3": (LIFE + "test_rewind", REUSE + "test_unaligned_ends"),
    "S4": (LIFE + "test_branch",),
    "S5": (LIFE + "test_regenerate",),
    "S6": (LIFE + "test_six_unrelated_prompts",),
    "S7": (LIFE + "test_old_chain_goes_with_its_window", LIFE + "test_old_chain_stays_on_full_attention"),
    "S8": (LIFE + "test_system_prompt_shared_by_conversations",),
    "S9": (LIFE + "test_two_conversations_on_one_prompt_survive_until_both_move_on",),
    "S10": Overridden(
        "6.4: a publisher without a conversation counts as one, the anonymous prefix stays at 16",
        (LIFE + "test_an_anonymous_publisher_counts",),
    ),
    "S11": (CONVERSATIONS + "test_overlap_first_wins_with_one_warning",),
    "S12": (
        REFERENCE + "test_a_cancel_keeps_the_chunks_that_were_published",
        REFERENCE + "test_a_cancel_on_a_snapshot_point_keeps_it",
    ),
    "S13": (REFERENCE + "test_an_ignored_request_outlives_the_one_that_was_counted",),
    "S14": (REFERENCE + "test_a_request_suspended_before_its_final_chunk_ends",),
    "S15": Overridden(
        "6.6: end_conversation, idle expiry and a bound on tracked conversations exist",
        (
            CONVERSATIONS + "test_end_of_a_forgotten_conversation_is_a_no_op",
            CONVERSATIONS + "test_idle_expiry_on_the_given_clock",
            CONVERSATIONS + "test_bound_on_tracked_conversations",
        ),
    ),
}
D: dict[str, tuple[str, ...] | Overridden] = {
    "D1": (REUSE + "test_pin_outlives_close",),
    "D2": (
        LIFE + "test_state_of_a_transfer_needs_only_the_live_range",
        STATS + "test_a_transfer_counts_the_windows_that_came",
        "integration/cluster/test_faults.py::test_damaged_blocks_of_a_back_flow_are_not_published",
    ),
    "D3": Overridden(
        "6.3: both sides keep turns, a conversation is current until its prompt is computed",
        (CONVERSATIONS + "test_next_prompt_during_the_previous_decode_is_no_overlap",),
    ),
    "D4": Overridden(
        "6.1: answers are published: 27 tokens, not 20", (LIFE + "test_answers", REUSE + "test_answers_are_published")
    ),
    "D5": (
        "unit/cluster/frontend/test_generate_routes.py::test_chat_answer_parses_as_openai_has_it_and_accounts_for_the_prompt",
    ),
    "D6": ("unit/cluster/config/test_checks.py::test_what_does_not_go_together_is_refused",),
}
A: dict[str, tuple[str, ...] | Overridden] = {
    "A1": (REFERENCE + "test_chunks_of_a_windowed_prompt",),
    "A2": (REFERENCE + "test_chunks_of_a_windowed_prompt",),
    "A3": (REFERENCE + "test_cancel_frees_the_conversation_of_a_windowed_model",),
    "A4": (REFERENCE + "test_the_next_turn_takes_the_old_window_away",),
    "A5": (REFERENCE + "test_the_last_two_of_three_prompts",),
    "A6": (REFERENCE + "test_an_overlapping_request_is_a_request_without_conversation",),
    "A7": (LIFE + "test_handles_share_pages_between_prompts_of_different_length", CONVERSATIONS + "test_double_drop"),
    "A8": (LIFE + "test_no_plan_when_a_page_is_missing",),
    "A9": (
        LIFE + "test_window_kept_at_the_prompt_end_only",
        REFERENCE + "test_the_committed_prefix_is_all_there_at_creation",
    ),
    "A10": (REUSE + "test_partial_reuse_and_its_switch", REFERENCE + "test_a_prompt_shorter_than_the_block_it_ends_in"),
    "A11": (STATS + "test_full_and_partial_reuse",),
    "A12": (STATS + "test_stale_blocks_of_a_window_are_not_counted", LIFE + "test_identical_prompt_on_a_window_model"),
    "A13": (REUSE + "test_all_reusable_publishes_at_each_chunk",),
    "A14": (REUSE + "test_others_publish_at_the_end_of_the_prompt",),
    "A15": (REFERENCE + "test_only_what_was_not_there_is_committed",),
    "A16": (REFERENCE + "test_only_the_window_at_the_prompts_end_is_kept",),
    "A17": (LIFE + "test_a_snapshot_must_be_met_exactly", REFERENCE + "test_a_probe_lands_on_that_turns_snapshot"),
    "A18": (
        LIFE + "test_periodic_interval_is_switched_off_per_conversation",
        REFERENCE + "test_the_prompts_end_is_the_only_point",
    ),
    "A19": (REFERENCE + "test_commit_then_plan",),
    "A20": (STATS + "test_prompt_then_answer", STATS + "test_what_was_given_back_unused_is_not_reported"),
    "A21": (
        REUSE + "test_scopes_do_not_share",
        REFERENCE + "test_scopes_isolate_in_both_directions",
        STATS + "test_scopes_in_numbers",
    ),
    "A22": (
        REUSE + "test_partial_block_is_not_rebased_and_not_written",
        REFERENCE + "test_partial_blocks_of_different_length",
    ),
    "A23": (STATS + "test_two_life_cycles",),
    "A24": (STATS + "test_sums_over_pools",),
    "A25": (CONFIG + "test_refused", CONFIG + "test_older_spelling", CONFIG + "test_warnings"),
    "A26": (
        LIFE + "test_branch_point_numbers",
        REFERENCE + "test_branch_points_are_not_recorded_without_windows_or_states",
    ),
}
B: dict[str, tuple[str, ...] | Overridden] = {
    **{f"B{number}": S[f"S{number}"] for number in range(1, 13)},
    "B13": (
        CONVERSATIONS + "test_end_of_a_forgotten_conversation_is_a_no_op",
        REFERENCE + "test_an_ignored_request_outlives_the_one_that_was_counted",
    ),
    "B14": (LIFE + "test_five_turns_hybrid",),
    "B15": (LIFE + "test_a_turn_without_plan_leaves_the_queue_alone",),
    "B16": (LIFE + "test_a_page_that_is_read_survives_the_drop",),
    "B17": (LIFE + "test_outstanding_handles_at_shutdown",),
    "B18": (LIFE + "test_rewind", REUSE + "test_unaligned_ends"),
    "B19": (
        REFERENCE + "test_a_request_suspended_before_its_final_chunk_ends",
        REFERENCE + "test_a_request_that_is_closed_while_suspended_frees_its_conversation",
    ),
}
F: dict[str, tuple[str, ...] | Overridden] = {
    "F1": A["A25"],  # nested config
    "F2": A["A18"],  # periodic snapshots vs conversation
    "F3": A["A13"],  # all_reusable
    "F4": (*A["A1"], *A["A9"], *A["A14"]),  # per_request
    "F5": (*A["A4"], *A["A5"], *A["A17"], *B["B14"]),  # per_conversation
    "F6": S["S1"],
    "F7": S["S2"],
    "F8": S["S4"],
    "F9": S["S5"],
    "F10": A["A6"],
    "F11": (*A["A3"], *B["B13"]),
    "F12": (*A["A8"], *B["B15"]),
    "F13": (*A["A7"], *B["B16"], *B["B17"]),
    "F14": (*S["S8"], *A["A26"]),
    "F15": (*A["A10"], *A["A11"], *A["A22"], *B["B18"]),
    "F16": (*A["A6"], *A["A12"]),
    "F17": A["A21"],
    "F18": (*A["A17"], LIFE + "test_two_turns_ending_in_one_block_keep_both_states"),
    "F19": (*A["A9"], *A["A12"], LIFE + "test_live_range", LIFE + "test_the_reused_length_is_common_to_all_windows"),
    "F20": S["S7"],
    "F21": D["D1"],
    "F22": D["D3"],
    "F23": D["D4"],
    "F24": (
        TIERS + "test_host_tier_is_priority_then_least_recently_used",
        OPS + "test_resume_waits_below_the_utilisation_gate",
    ),
    "F25": (
        *A["A11"],
        *A["A20"],
        *A["A23"],
        *A["A24"],
        EVENTS + "test_stored_blocks_have_chained_keys",
        TIERS + "test_events_tell_the_tier",
    ),
}
ROWS = {**S, **D, **A, **B, **F}
