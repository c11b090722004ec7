"""Kinds of fault that users of such systems report, and the cells of the fault matrix and tests that rule them out.

The numbers are those of the collection of public threads. A cell is ``kind x step x when``; a test ``file::name``.
``python -m tests.integration.transceiver.public_reports`` prints the table.
"""

from __future__ import annotations

_UNIT, _PROCESSES = "tests/unit/transceiver/", "tests/integration/transceiver/test_processes.py::"
_CLUSTER, _CACHE, _WEB = "tests/integration/cluster/", "tests/unit/kvcache/", "tests/unit/cluster/frontend/"
_TRANSFERS, _KINDS = f"{_UNIT}test_transfers.py::", "tests/integration/cluster/test_report_kinds.py::"

COVERED: dict[int, tuple[str, ...]] = {
    1: ("kill sender x get x during", f"{_PROCESSES}test_a_killed_holder_is_an_error_at_once"),
    2: ("drop x Ack x during", f"{_TRANSFERS}test_a_receivers_cancel_reaches_the_holder"),
    4: ("stall x Grant x during", f"{_TRANSFERS}test_a_page_that_changed_hands_before_the_request_is_not_granted"),
    5: ("stall x Grant x after", f"{_TRANSFERS}test_a_page_given_out_anew_during_the_copy_is_found_without_digests"),
    6: ("full queue x Grant x before", f"{_PROCESSES}test_a_holders_cancel_and_lease_reach_the_receiver"),
    7: ("drop x Ack x before", f"{_TRANSFERS}test_blocks_arrive_byte_for_byte_and_both_sides_say_so"),
    9: (f"{_UNIT}test_report_kinds.py::test_damage_in_one_of_two_groups_is_named_by_group",),
    11: (f"{_CACHE}test_reuse.py::test_scopes_do_not_share",
         f"{_CLUSTER}test_local_cluster.py::test_salts_do_not_share_blocks_though_the_conversation_id_is_the_same"),
    12: (f"{_KINDS}test_a_fresh_prompt_counts_nothing_as_cached_though_it_travelled",
         f"{_WEB}test_generate_routes.py::test_second_turn_counts_cached_tokens_and_splices"),
    13: (f"{_PROCESSES}test_a_layout_mismatch_is_refused_by_field",),
    14: (f"{_CLUSTER}test_frontend_over_cluster.py::test_prompt_beyond_the_pool_is_refused_and_the_server_goes_on",),
    16: ("cut x PullRequest x before",
         f"{_CLUSTER}test_frontend_over_cluster.py::test_client_that_leaves_frees_the_workers",
         f"{_UNIT}test_retries.py::test_a_grant_ends_when_its_receiver_vanishes_before_it_asked"),
    17: (f"{_UNIT}test_unlike_layouts.py::test_unlike_layouts",
         "tests/integration/transceiver/test_layouts.py::test_layouts"),
    18: ("delay x get x during",
         f"{_TRANSFERS}test_a_time_out_ends_both_sides_and_keeps_the_pages_in_quarantine"),
    19: (f"{_CLUSTER}test_broken_engine.py::test_a_model_that_fails_once_costs_one_request",),
    21: ("kill sender x Hello x before",
         f"{_CLUSTER}test_pipelined.py::test_the_death_of_either_worker_meanwhile_costs_no_token"),
    22: ("full queue x PullRequest x before",
         f"{_UNIT}test_report_kinds.py::test_early_requests_are_bounded_and_expire",
         f"{_TRANSFERS}test_a_forged_token_is_refused"),
    23: (f"{_CACHE}test_operations.py::test_close_of_a_suspended_sequence",),
    25: (f"{_CLUSTER}test_sessions.py::test_random_cancels_leak_nothing_and_spoil_no_answer",
         "tests/e2e/test_demo.py::test_five_turns_and_a_rewind_are_reused_and_equal"),
    26: (f"{_UNIT}test_unlike_layouts.py::test_duplicated_heads",
         f"{_UNIT}test_mapping.py::test_every_combination_covers_each_head_and_layer_once"),
    28: (f"{_KINDS}test_idle_conversations_never_keep_a_new_one_out",
         f"{_CACHE}test_stats.py::test_pools_of_the_moment"),
    29: (f"{_CLUSTER}test_local_cluster.py::"
         "test_five_turns_then_a_rewind_are_equal_to_an_aggregated_run_and_compute_only_what_is_new",),
    # One orchestrator holds every binding: there are no replicas that could differ, and what is derived is stable.
    30: ("tests/unit/cluster/routing/test_routers.py::test_a_conversation_stays_on_its_worker_whatever_the_load",
         f"{_CACHE}test_keys_between_processes.py::test_keys_do_not_depend_on_the_process"),
    31: ("tests/e2e/test_serve_process.py::test_requests_in_progress_may_finish_and_new_ones_are_refused",
         "tests/slurm/test_drain.py::test_a_request_in_progress_finishes_when_the_job_is_told_to_end"),
    32: ("delay x get x before", f"{_CACHE}test_reuse.py::test_pin_outlives_close"),
    34: ("delay x get x after",
         f"{_UNIT}test_report_kinds.py::test_every_block_of_a_batch_is_checked_for_its_generation"),
    35: ("tests/unit/cluster/routing/test_routers.py::test_a_lost_worker_moves_the_conversation_and_it_sticks_again",
         f"{_CLUSTER}test_prefix_loans.py::test_a_lender_that_dies_before_the_pull_costs_a_recomputation"),
    37: (f"{_TRANSFERS}test_a_grant_serves_its_conversation_and_scope_only",
         f"{_CLUSTER}test_prefix_loans.py::test_one_tenants_blocks_are_never_lent_to_another"),
    38: (f"{_KINDS}test_the_metrics_say_where_prompts_were_computed_and_what_travelled",
         "tests/unit/cluster/doctor/test_link_check.py::test_a_real_link_between_two_processes"),
    39: ("tests/integration/ray/test_serving.py::"
         "test_with_retries_off_a_death_is_an_explicit_error_within_five_seconds_and_the_next_request_works",
         f"{_CLUSTER}test_faults.py::test_damaged_blocks_of_a_hand_off_are_computed_again_and_counted"),
    40: (f"{_CACHE}test_keys_between_processes.py::test_keys_do_not_depend_on_the_process",),
    41: ("delay x Digests x before", f"{_TRANSFERS}test_a_request_may_come_before_its_publication"),
    44: (f"{_WEB}test_splicing.py::test_longest_remembered_beginning_before_a_turn_end_is_found",
         "tests/e2e/test_openai_client.py::"
         "test_a_chat_goes_on_from_the_generated_ids_though_its_text_encodes_to_others"),
    46: (f"{_PROCESSES}test_bytes_arrive_and_the_real_transport_is_named",
         "tests/integration/transceiver/test_cma_refused.py::test_another_users_process_is_not_read"),
}  # fmt: skip


def render() -> str:
    """The table as text."""
    return "\n".join(f"{row:3}  {name}" for row, names in sorted(COVERED.items()) for name in names)


if __name__ == "__main__":
    print(render())
