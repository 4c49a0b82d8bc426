"""Published weights stay exactly as long as somebody may read them."""

from hypothesis import given
from hypothesis import strategies as st

from mage_services.weights.weight_store import WeightLeases

events = st.lists(
    st.tuples(st.sampled_from(["tell", "loaded", "gone"]), st.sampled_from("abc")), max_size=40
)


@given(events)
def test_what_a_user_was_told_of_last_or_loaded_last_is_never_unused(happened) -> None:
    leases, newest = WeightLeases(), 0
    told, loaded = {}, {}
    for what, user in happened:
        if what == "tell":
            newest += 1
            leases.announce(user, newest)
            told[user] = newest
        elif what == "loaded" and user in told:
            leases.loaded(user, told[user])
            loaded[user] = told[user]
        elif what == "gone":
            leases.release(user)
            told.pop(user, None)
            loaded.pop(user, None)
        unused = leases.unused(range(newest + 1))
        assert not {*told.values(), *loaded.values()} & set(unused)
    for user in "abc":
        leases.release(user)
    assert leases.unused(range(newest + 1)) == list(range(newest + 1))


def test_a_user_that_loads_the_last_of_what_it_was_told_frees_all_before() -> None:
    leases = WeightLeases()
    for version in (1, 2, 3):
        leases.announce("a", version)
    assert leases.is_loading("a")
    leases.loaded("a", 3)
    assert not leases.is_loading("a")
    assert leases.unused([1, 2, 3, 4]) == [1, 2, 4]
