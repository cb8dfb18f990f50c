"""Values of any kind that a file or a command line may hold, drawn by hypothesis."""

from hypothesis import strategies as st

NASTY = ["", "\0", "\n", "'", "a\\'", "[", "{a", "#", "é", "null", "nan", "1e400", "0x10", "???", "${", "${seed}", "~x"]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.sampled_from([2**31, 2**63, 10**400, -(2**64)]),
    st.floats(),
    st.sampled_from([*NASTY, "a" * 5000, "9" * 5000, "a/" * 2500]),
    st.text(max_size=10),
)
ANYTHING = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("aé_5", max_size=2), inner, max_size=2)
)
