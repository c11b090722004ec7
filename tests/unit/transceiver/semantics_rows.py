"""Which test shows which acceptance case of the reference specification (`transceiver-semantics.md`, section 2).

Rows: G the common geometry, T1..T7 the tests of the single-process transceiver, K1..K8 those of the layer below, in
their order; N1..N19 the neighbours that the section names, in their order; C the component cases of its lifecycle
document, GPU its GPU cases, and that document's requirements by their names. A test is named by its file below
`tests/` and its function. `instead` is set where a row holds in another way here: which decision of the design
(section) replaces it, or what the machine lacks.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ROWS", "Row"]


@dataclass(frozen=True)
class Row:
    """Tests of an acceptance case; `instead`: why they show something else than the reference's words."""

    tests: tuple[str, ...]
    instead: str = ""


LAYOUTS = "integration/transceiver/test_layouts.py::"
LENGTHS = "integration/transceiver/test_layouts_lengths.py::"
STATE = "integration/transceiver/test_layouts_state.py::"
PROCESSES = "integration/transceiver/test_processes.py::"
FAULTS = "integration/transceiver/test_process_faults.py::"
MATRIX = "integration/transceiver/test_fault_matrix.py::test_every_fault_at_every_step"
BAD_CALLS = "unit/transceiver/test_bad_calls.py::"
CHUNKS = "unit/transceiver/test_chunking.py::"
TRANSFERS = "unit/transceiver/test_transfers.py::"
FOLDED = "unit/transceiver/test_folded_pull.py::"
UNLIKE = "unit/transceiver/test_unlike_layouts.py::"
MAPPING = "unit/transceiver/test_mapping.py::"
STATES = "unit/transceiver/test_transfer_state.py::"

NO_AUX = (
    "7: there is no second buffer; the first token and the counts travel with the control call that carries the ticket"
)
ONE_MANAGER = "6: there is one cache manager, not two versions of it"
PULLED = "7: the receiver pulls, no peer writes here; what is not over yet keeps its pages in quarantine"

T: dict[str, Row] = {
    "G": Row(
        (LAYOUTS + "test_layouts", LAYOUTS + "test_pool_forms", MAPPING + "test_bytes_land_where_they_belong"),
        "the head size is 8 to 2048 elements, so that every way to read a fragment is taken; more is compared: the "
        "whole pools of both sides",
    ),
    "T1": Row(
        (LENGTHS + "test_either_side_may_come_first", LAYOUTS + "test_layouts"),
        "7: no rank speaks for another, each has its outcome; requests go over together, from the next dp group each",
    ),
    "T2": Row((LAYOUTS + "test_layouts", LAYOUTS + "test_duplicated_heads")),
    "T3": Row((LAYOUTS + "test_layouts", LENGTHS + "test_boundary_lengths"), ONE_MANAGER),
    "T4": Row((LAYOUTS + "test_uneven_stages", LENGTHS + "test_boundary_lengths_of_every_layout"), ONE_MANAGER),
    "T5": Row(
        (
            LENGTHS + "test_boundary_lengths",
            LENGTHS + "test_lengths_around_a_long_window",
            LENGTHS + "test_boundary_lengths_of_every_layout",
        ),
        ONE_MANAGER,
    ),
    "T6": Row((STATE + "test_replicated_index_keys", STATE + "test_stages_without_index_keys")),
    "T7": Row(
        (
            LAYOUTS + "test_head_mismatch_is_staged",
            UNLIKE + "test_staging_buffers_fit_the_pages_of_every_group",
            LAYOUTS + "test_pool_forms",
        ),
        "7: small fragments come with their page through the receiver's staging buffer; reads are counted",
    ),
}
K: dict[str, Row] = {
    "K1": Row(
        (
            BAD_CALLS + "test_impossible_tables_are_refused_on_both_sides",
            TRANSFERS + "test_impossible_tables_are_the_callers_error",
            TRANSFERS + "test_an_empty_list_releases_the_holder",
            STATES + "test_the_happy_path",
        ),
        "7: what moves is named by block tables (ordinals, pages, valid tokens), not by ranges; eight states, three of "
        "them for an end without success",
    ),
    "K2": Row(
        (
            CHUNKS + "test_every_block_leaves_once",
            CHUNKS + "test_a_partial_last_block_goes_with_the_last_chunk",
            CHUNKS + "test_thousand_blocks",
            CHUNKS + "test_windowed_blocks_are_held_back_and_stale_ones_never_move",
        )
    ),
    "K3": Row(
        (
            LENGTHS + "test_either_side_may_come_first",
            TRANSFERS + "test_a_request_may_come_before_its_publication",
        ),
        NO_AUX,
    ),
    "K4": Row((LENGTHS + "test_windows_longer_than_the_prompt", LENGTHS + "test_lengths_around_a_long_window")),
    "K5": Row((LENGTHS + "test_only_missing_blocks_move", LENGTHS + "test_blocks_leave_chunk_by_chunk")),
    "K6": Row(
        (
            TRANSFERS + "test_a_receivers_cancel_reaches_the_holder",
            TRANSFERS + "test_a_holders_cancel_reaches_the_receiver",
            TRANSFERS + "test_an_end_while_connecting_reaches_the_holder",
            PROCESSES + "test_a_receivers_time_out_and_cancel_reach_the_holder",
        )
    ),
    "K7": Row(
        (
            PROCESSES + "test_a_layout_mismatch_is_refused_by_field",
            PROCESSES + "test_a_wrong_secret_is_refused_and_others_go_on",
            STATE + "test_state_on_one_side_only_is_refused",
            TRANSFERS + "test_another_secret_is_refused_and_nothing_else_disturbed",
        )
    ),
    "K8": Row(
        (
            LENGTHS + "test_blocks_leave_chunk_by_chunk",
            STATE + "test_state_leaves_with_the_last_chunk",
            "integration/cluster/test_pipelined.py::test_two_turns_are_those_of_a_run_without",
        )
    ),
}
N: dict[str, Row] = {
    "N1": Row(  # messenger
        (
            "unit/transceiver/test_wire.py::test_round_trip",
            "property/transceiver/test_wire_fuzz.py::test_arbitrary_bytes",
        )
    ),
    "N2": Row(  # agent
        (
            "unit/transceiver/test_ucx_link.py::test_a_few_bytes_are_read_at_once",
            "unit/transceiver/test_nixl_fabric.py::test_a_read_is_over_when_the_agent_says_so",
        )
    ),
    "N3": Row(  # dealers and threads
        (PROCESSES + "test_several_holders_at_once", PROCESSES + "test_close_leaves_no_thread_and_no_port"),
        "7: one thread drives all links",
    ),
    "N4": Row((BAD_CALLS + "test_ids_and_tokens_that_no_message_carries_are_refused",), NO_AUX),  # aux registration
    "N5": Row(("unit/transceiver/test_handshake.py::test_the_differing_field_is_named",)),  # peer
    "N6": T["T7"],  # bounce, gather and scatter
    "N7": K["K8"],  # chunked
    "N8": Row(  # Mamba
        (
            STATE + "test_all_kinds_of_groups_in_one_transfer",
            STATE + "test_a_prompt_without_state",
            STATE + "test_state_on_one_side_only_is_refused",
        )
    ),
    "N9": Row(  # KDA: its convolutions' states are sections, as any other's
        (
            STATE + "test_all_kinds_of_groups_in_all_forms",
            UNLIKE + "test_recurrent_state_is_cut_by_section",
            MAPPING + "test_conv_state_is_cut_section_by_section",
        )
    ),
    "N10": Row((PROCESSES + "test_bytes_arrive_and_the_real_transport_is_named", LAYOUTS + "test_layouts")),
    "N11": Row(  # fail-stop
        (
            FAULTS + "test_the_holder_dies",
            FAULTS + "test_the_receiver_dies",
            FAULTS + "test_the_holder_stands_still_and_goes_on",
        )
    ),
    "N12": Row(  # consensus
        (
            FOLDED + "test_one_failed_part_fails_the_whole_and_ends_the_others",
            FOLDED + "test_a_folded_pull_keeps_its_pages_until_every_part_has_ended",
        ),
        "7: the receiver folds the outcomes of its sources; there is no collective",
    ),
    "N13": Row(  # cluster storage
        ("unit/cluster/fleet/test_fleet.py::test_a_lost_worker_comes_back_for_those_who_wait",),
        "8: no home-made cluster manager, Ray tells of deaths",
    ),
    "N14": Row(  # cluster manager and worker
        ("unit/cluster/fleet/test_worker_handle.py::test_a_process_that_does_not_answer_is_killed",),
        "8: no home-made cluster manager, Ray tells of deaths",
    ),
    "N15": Row(  # OpenAI service, server and client
        (
            "e2e/test_openai_client.py::test_completions_give_the_golden_tokens_for_text_and_for_token_ids",
            "unit/cluster/frontend/test_generate_routes.py::test_chat_answer_parses_as_openai_has_it_and_accounts_for_the_prompt",
        )
    ),
    "N16": Row(  # parameters of a disaggregated request
        (
            TRANSFERS + "test_a_grant_serves_its_conversation_and_scope_only",
            TRANSFERS + "test_a_forged_token_is_refused",
        ),
        "7: a ticket, made and checked by the holder",
    ),
    "N17": Row(  # perf metrics
        (
            TRANSFERS + "test_the_csv_has_one_header_and_one_line_per_pull",
            "integration/cluster/test_report_kinds.py::test_the_metrics_say_where_prompts_were_computed_and_what_travelled",
        )
    ),
    "N18": Row(  # harness and its reports
        (
            "integration/transceiver_test/test_transceiver_test.py::test_everything_passes_and_the_turns_move_only_missing_blocks",
            "unit/cluster/transceiver_test/test_parts.py::test_the_files_hold_every_length",
        )
    ),
    "N19": Row(("slurm/test_transceiver_test.py::test_two_nodes_pass_over_tcp",)),  # submit
}
QUARANTINE = (
    TRANSFERS + "test_a_time_out_ends_both_sides_and_keeps_the_pages_in_quarantine",
    FOLDED + "test_a_folded_pull_keeps_its_pages_until_every_part_has_ended",
)
LIFECYCLE: dict[str, Row] = {
    "C": Row((*QUARANTINE, MATRIX), PULLED),
    "GPU": Row(
        ("integration/transceiver/test_cuda.py::test_pages_in_cuda_memory_arrive_and_are_verified",),
        "needs a CUDA device: skipped where there is none; cancel, time-out and death concern no memory type",
    ),
    "PROFILE": Row(QUARANTINE, "7: the strict rule always holds, there is no profile without it"),
    "ADMISSION": Row(QUARANTINE, PULLED),
    "CANCEL-REUSE": Row((*QUARANTINE, "property/transceiver/test_random_faults.py::TestRandomFaults")),
    "SOURCE": Row(
        (
            "unit/kvcache/test_reuse.py::test_pin_outlives_close",
            TRANSFERS + "test_a_lease_that_runs_out_under_a_reader_stops_it",
        ),
    ),
    "COHORT": Row((FOLDED + "test_a_folded_pull_keeps_its_pages_until_every_part_has_ended",), PULLED),
    "OUTCOME": Row((STATES + "test_a_terminal_state_is_never_replaced",)),
    "LATE-DONE": Row((MATRIX, TRANSFERS + "test_a_grant_is_good_once")),
    "DEADLINE": Row(
        (
            TRANSFERS + "test_a_lease_that_ran_out_frees_the_holder_and_refuses_the_late_receiver",
            PROCESSES + "test_a_receivers_time_out_and_cancel_reach_the_holder",
        ),
    ),
    "CONTAINMENT": Row((TRANSFERS + "test_another_secret_is_refused_and_nothing_else_disturbed",), PULLED),
    "IDENTITY": Row((TRANSFERS + "test_a_page_given_out_anew_during_the_copy_is_found_without_digests",)),
    "COVERAGE": Row(("integration/transceiver/test_public_reports.py::test_what_covers_a_row_exists", MATRIX)),
    "CANCELLATION": K["K6"],
}
ROWS: dict[str, Row] = {**T, **K, **N, **LIFECYCLE}
