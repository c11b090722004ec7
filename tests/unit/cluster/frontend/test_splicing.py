from __future__ import annotations

from cluster.frontend.splicing import SplicingStore

END = "<end>"


def test_longest_remembered_beginning_before_a_turn_end_is_found() -> None:
    store = SplicingStore(100)
    store.remember("a", [1], cache_salt=None)
    store.remember("a<end>b", [1, 2, 3], cache_salt=None)
    splice = store.find("a<end>b<end>c", END, cache_salt=None)
    assert splice is not None
    assert (splice.token_ids.tolist(), splice.num_chars) == ([1, 2, 3], len("a<end>b"))


def test_whole_text_is_found_but_no_cut_inside_text() -> None:
    store = SplicingStore(100)
    store.remember("ab", [7], cache_salt=None)
    assert store.find("ab", END, cache_salt=None) is not None
    assert store.find("abc<end>", END, cache_salt=None) is None


def test_altered_text_finds_nothing() -> None:
    store = SplicingStore(100)
    store.remember("q<end>answer", [1, 2], cache_salt=None)
    for altered in ("q<end>Answer<end>", "q<end>answer <end>", "Q<end>answer<end>", "q<end>answe<end>"):
        assert store.find(altered, END, cache_salt=None) is None


def test_salts_do_not_see_each_other() -> None:
    store = SplicingStore(100)
    store.remember("a", [1], cache_salt="one")
    assert store.find("a<end>", END, cache_salt=None) is None
    assert store.find("a<end>", END, cache_salt="two") is None
    assert store.find("a<end>", END, cache_salt="one") is not None


def test_least_recently_used_entries_leave_when_the_bound_is_reached() -> None:
    store = SplicingStore(4)
    store.remember("a", [1, 1], cache_salt=None)
    store.remember("b", [2, 2], cache_salt=None)
    assert store.find("a", END, cache_salt=None) is not None  # now the most recent
    store.remember("c", [3, 3], cache_salt=None)
    assert store.find("b", END, cache_salt=None) is None
    assert store.find("a", END, cache_salt=None) is not None
    assert (len(store), store.num_ids) == (2, 4)


def test_newer_ids_of_a_text_replace_older_ones_and_the_count_stays_right() -> None:
    store = SplicingStore(10)
    store.remember("a", [1, 2, 3], cache_salt=None)
    store.remember("a", [9], cache_salt=None)
    splice = store.find("a", END, cache_salt=None)
    assert splice is not None
    assert splice.token_ids.tolist() == [9]
    assert store.num_ids == 1
    store.clear()
    assert (len(store), store.num_ids) == (0, 0)


def test_an_entry_beyond_the_bound_is_not_kept() -> None:
    store = SplicingStore(1)
    store.remember("a", [1, 2], cache_salt=None)
    assert len(store) == 0
