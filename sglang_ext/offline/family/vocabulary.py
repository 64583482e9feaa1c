"""The words of the family's little world. Every one of them is a single token, with its leading space."""

NAMES: tuple[str, ...] = (
    "Adam", "Alice", "Anna", "Ben", "Bruno", "Carl", "Clara", "Dana", "David", "Diana", "Edgar", "Ella",
    "Emma", "Eric", "Felix", "Fiona", "Frank", "Grace", "Greta", "Hanna", "Hugo", "Ida", "Ivan", "Jack",
    "Jana", "Jane", "Karl", "Kate", "Laura", "Leo", "Linda", "Lucas", "Maria", "Martin", "Mia", "Nina",
    "Noah", "Olga", "Otto", "Paul", "Petra", "Rita", "Rosa", "Sara", "Sam", "Tina", "Tom", "Victor",
)  # fmt: skip

ITEMS: tuple[str, ...] = (
    "apples", "bags", "balls", "boats", "books", "bottles", "boxes", "cakes", "candles", "cards", "coins",
    "cups", "eggs", "flowers", "keys", "lamps", "lemons", "maps", "pencils", "pens", "plates", "ropes",
    "shells", "stamps",
)  # fmt: skip

COUNTS: tuple[int, ...] = tuple(range(2, 13))
"""How many items one person may have. Sums of up to three stay below ``NUMBERS.stop``."""

NUMBERS = range(0, 61)
"""The integers that are one token each when a space precedes them."""

ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "city": (
        "Athens", "Berlin", "Cairo", "Delhi", "Lima", "Lisbon", "London", "Madrid",
        "Milan", "Moscow", "Oslo", "Paris", "Prague", "Rome", "Tokyo", "Warsaw",
    ),
    "hobby": (
        "bridge", "cello", "chess", "darts", "drums", "flute",
        "golf", "guitar", "harp", "hockey", "piano", "poker", "rugby", "tennis", "trumpet", "violin",
    ),
    "pet": (
        "bird", "camel", "cat", "cow", "dog", "duck", "goat", "goose", "hen",
        "horse", "parrot", "pig", "pony", "rabbit", "sheep", "turtle",
    ),
    "language": (
        "Arabic", "Chinese", "Czech", "Danish", "Dutch", "English", "Finnish", "French", "German",
        "Greek", "Hindi", "Irish", "Latin", "Polish", "Spanish", "Turkish",
    ),
    "food": (
        "beans", "bread", "butter", "cheese", "chicken", "fish", "grapes", "honey", "melon",
        "olives", "onions", "pasta", "pizza", "rice", "salad", "soup",
    ),
    "color": (
        "black", "blue", "brown", "copper", "gold", "gray", "green", "ivory", "lilac",
        "navy", "orange", "pink", "purple", "red", "silver", "white",
    ),
}  # fmt: skip

STATEMENTS: dict[str, str] = {
    "city": "{name} lives in {value}",
    "hobby": "{name} plays the {value}",
    "pet": "{name} owns a {value}",
    "language": "{name} speaks fluent {value}",
    "food": "{name} likes fresh {value}",
    "color": "{name} wears bright {value}",
}
"""One sentence per attribute, without its leading space and full stop."""

QUESTIONS: dict[str, str] = {
    "city": "Where does {name} live?",
    "hobby": "What does {name} play?",
    "pet": "Which animal does {name} own?",
    "language": "Which language does {name} speak?",
    "food": "Which food does {name} like?",
    "color": "Which color does {name} wear?",
}

MANY_THINGS = "How many things do {names} have together?"
"""The question of an arithmetic story; ``names`` is a spoken list of two or three."""


def content_words() -> tuple[str, ...]:
    """Every name, item, attribute value and number, in a fixed order, without the leading space."""
    values = (value for kind in ATTRIBUTES.values() for value in kind)
    return (*NAMES, *ITEMS, *values, *map(str, NUMBERS))
