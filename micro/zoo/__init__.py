"""Published rules and baselines of papers. A part of the zoo is imported when its name is used, not before.

``PARTS`` maps the name of a part, its word in yaml, to ``module:Class`` in this folder, by the group of its kind. A
part goes through the same registry as that of another package (`micro.parts`), whose entry points say the same. It uses
the rest of micro; nothing else in micro imports one.
"""

PARTS: dict[str, dict[str, str]] = {
    "micro.selectors": {
        "deft": "deft:Deft",
        "exdyna": "exdyna:ExDyna",
    },
    "micro.exchanges": {
        "gtopk": "gtopk:GTopK",
    },
    "micro.codecs": {
        "range_float": "range_float:RangeFloat",
        "terngrad": "terngrad:TernGrad",
    },
    "micro.index_codecs": {},
    "micro.densities": {},
    "micro.reducers": {
        "dct": "dct:DCTReducer",
        "fft": "fft:FFTReducer",
    },
}
