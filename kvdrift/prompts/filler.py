"""Sentences without end: the haystack of planted prompts, written by a seeded template and by hand.

The template writes about places that do not exist, so that no model can know the answer to a question about them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random


def listed(text: str, mark: str | None = None) -> tuple[str, ...]:
    """The words of `text`, or its phrases between `mark`s."""
    return tuple(text.split(mark))


ONSETS = listed(
    "Ald Bren Cor Dal El Fen Gar Hol Ist Jor Kel Lan Mor Nar Ost Pel Quen Ros Sel Tar Ulm Vel Wen Yar Zan "
    "Bar Cal Dor Fal Hav Kar Lor Mal Nor Per Sar Tol Var",
)
MIDDLES = listed("a e i o u an er il or un am en is ar")
CODAS = listed("mora dale wick stead holm ford mere ton bury gate haven field mont burg lund vik stad sund ness thorpe")

KINDS = listed("harbour mill library bridge market museum lighthouse quarry observatory station orchard foundry")
GOODS = listed("timber salt wool glass copper barley paper linen slate honey clay rope amber hemp tin")
TRADES = listed("architects sailors teachers weavers surveyors farmers clerks masons printers botanists")
SEASONS = ("early spring", "late spring", "midsummer", "autumn", "the first frost", "winter")
WEATHER = listed("fog rain wind snow heat drought storms hail")
PARTS = listed("roof tower cellar courtyard gate stairway chimney wall porch clock")
QUALITIES = listed("quiet narrow steep busy modest crowded remote windy sheltered cheerful damp bright")
VERBS = listed("repaired painted measured rebuilt inspected closed enlarged opened moved restored")

SHAPES = (
    "The {kind} at {place} was {verb} in {year} and handles mostly {goods}.",
    "In {season}, {people} from {place} travel to {other} to trade {goods} for {goods2}.",
    "Visitors often describe {place} as {quality}, although the {kind} there is rather {quality2}.",
    "After the {weather} of {year}, the {part} of the {kind} in {place} had to be {verb}.",
    "A road of about {number} kilometres links {place} with {other}, passing an old {kind}.",
    "Most {people} in {place} learned their trade at the {kind} before moving on to {other}.",
    "The council of {place} voted in {year} to keep the {kind} open during {season}.",
    "Nobody in {other} remembers who first brought {goods} to the {kind} of {place}.",
    "When {weather} comes, the {people} of {place} shelter in the {part} of the {kind}.",
    "Records from {year} list {number} crates of {goods} stored beside the {kind} in {place}.",
    "The {kind} in {other} is older, but the one in {place} has the finer {part}.",
    "Because the valley near {place} is {quality}, {goods} ripens there only in {season}.",
    "Two {people} from {other} wrote a short history of {place} and its {quality} {kind}.",
    "Each year the {part} is {verb} by {people} who are paid in {goods} and {goods2}.",
)


SUBJECTS = listed(
    "the old gardener,a young painter,the night watchman,a patient fisherman,the village baker,a tired traveller,"
    "the school teacher,a friendly neighbour,the quiet shepherd,a careful carpenter,the ferry pilot,a curious child",
    ",",
)
ACTIONS = listed(
    "walks slowly along the river,looks at the clouds above the hills,sweeps the yard before breakfast,"
    "waits for the bread to cool,listens to the birds in the hedge,carries water up from the well,"
    "reads a book beside the stove,mends a fence with patient hands,picks apples in the garden,"
    "feeds the ducks near the bridge,counts the boats coming home,hums a tune while working,"
    "rests in the shade of a tree,opens the window to the morning air,draws a map of the valley",
    ",",
)
MOMENTS = listed(
    "When the rain stops,In the early morning,After a long day,Before the market opens,On warm evenings,"
    "While the kettle boils,As the light fades,Once the snow has melted,Late in the afternoon,On quiet Sundays",
    ",",
)
ENDINGS = listed(
    "and nobody is in a hurry,because the weather is mild,while the dog sleeps by the door,"
    "and the smell of hay fills the air,though the path is still wet,as the bells ring far away,"
    "and the whole street is calm,until the lamps are lit,while the leaves turn gold,and then goes home",
    ",",
)


def place_name(rng: Random) -> str:
    """An invented place, one of about ten thousand."""
    return rng.choice(ONSETS) + rng.choice(MIDDLES) + rng.choice(CODAS)


def invented(rng: Random) -> Iterator[str]:
    """Sentences about invented places, for ever."""
    while True:
        goods, goods2 = rng.sample(GOODS, 2)
        quality, quality2 = rng.sample(QUALITIES, 2)
        yield rng.choice(SHAPES).format(
            place=place_name(rng),
            other=place_name(rng),
            kind=rng.choice(KINDS),
            people=rng.choice(TRADES),
            season=rng.choice(SEASONS),
            weather=rng.choice(WEATHER),
            part=rng.choice(PARTS),
            verb=rng.choice(VERBS),
            goods=goods,
            goods2=goods2,
            quality=quality,
            quality2=quality2,
            year=rng.randrange(1710, 1990),
            number=rng.randrange(3, 90),
        )


def calm(rng: Random) -> Iterator[str]:
    """Sentences with no name and no number, for ever: filler that competes with no planted fact."""
    while True:
        yield f"{rng.choice(MOMENTS)}, {rng.choice(SUBJECTS)} {rng.choice(ACTIONS)}, {rng.choice(ENDINGS)}."


def mixed(rng: Random, paragraphs: Sequence[str]) -> Iterator[str]:
    """Written paragraphs in seeded order, each followed by invented sentences; the latter for ever."""
    template = invented(rng)
    for paragraph in rng.sample(paragraphs, len(paragraphs)):
        yield paragraph
        for _ in range(3):
            yield next(template)
    yield from template


def alternating(rng: Random, first: Iterator[str], second: Iterator[str]) -> Iterator[str]:
    """Two or three sentences of one topic, then of the other, for ever."""
    while True:
        for topic in (first, second):
            for _ in range(rng.randrange(2, 4)):
                yield next(topic)


def numbered(rng: Random, sentences: Iterator[str], taken: str) -> Iterator[str]:
    """Each sentence as a retrieved passage with an id in brackets, never the id `taken`."""
    for sentence in sentences:
        number = passage_id(rng)
        while number == taken:
            number = passage_id(rng)
        yield f"[{number}] {sentence}"


def passage_id(rng: Random) -> str:
    """The id of a retrieved passage: three digits."""
    return f"{rng.randrange(100, 1000)}"
