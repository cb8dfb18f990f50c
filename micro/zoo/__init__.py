"""Methods of papers that are not part of the core; each is imported when its name is used.

``PARTS`` maps the name of a part in yaml to ``module:Class`` in this folder, by the group of its kind, like the entry
points of other packages (`micro.parts`). Parts may use the rest of micro; nothing else in micro imports them.
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
