"""A world: people, films, cities, studios and countries with facts, written down as short passages among noise.

Names are made of pools of words, and their combinations are split between training and evaluation. Every word belongs
to one pool, is plain ASCII, and occurs nowhere in the prose: a small tokenizer can give each its own piece.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import zlib
from collections.abc import Collection, Mapping, Sequence

from agentr1_jax.tools.search import BM25, Passage

FIRST = """Ada Alma Anton Arlo Astrid Basil Bela Bruno Carla Cecil Clara Cyrus Dora Edgar Elsa Emil Enid Ezra
Felix Flora Franz Gideon Greta Hanna Hector Hugo Ida Igor Ines Irma Ivan Jonas Judith Karl Klara Lena Leo
Lidia Linus Lola Magda Marco Martha Max Milo Mina Nadia Nils Nora Olga Oscar Otto Petra Quentin Rita Roman
Rosa Saul Selma Sonia Tessa Theo Vera Viktor""".split()
LAST = """Abbott Archer Banner Barlow Becker Benton Bowman Brandt Calder Carver Castell Corvin Crane Dalton
Decker Draper Dunmore Ekman Ellis Farrow Fenwick Finch Fisk Forsyth Garner Gorman Hadley Halvors Harlan Hewitt
Holm Ibsen Jansen Keller Kesh Kirby Larkin Lindgren Lowell Marsh Mercer Merrill Nash Norwood Olsen Osborne
Palmer Pryor Quill Radley Renner Rourke Sawyer Sloan Stroud Tanner Thorne Trent Underhill Vance Voss Weaver
Wexler Yates""".split()
ADJECTIVE = """Amber Ashen Bitter Blind Blue Bright Broken Burning Cold Copper Crimson Distant Empty Endless
Faded Fallen Final Frozen Gentle Glass Golden Hidden Hollow Iron Lonely Lost Painted Pale Paper Quiet Restless
Scarlet Secret Silent Silver Stolen Velvet Wandering Wild Wooden""".split()
NOUN = """Anthem Bridge Cabin Candle Carnival Circus Clock Crown Dancer Desert Dream Echo Empire Engine
Feather Forest Fortune Garden Ghost Harbor Highway Horizon Hunter Island Journey Kingdom Lantern Letter Mirror
Morning Orchard Promise Rider River Shadow Stranger Summer Tower Voyage Winter""".split()
SITE = "Port Fort Mount Saint Lake Cape North South East West Upper Lower Old Grand Great Little".split()
TOWN = """Alder Arden Belmont Birch Brook Cedar Dover Elmore Fairview Grove Haven Kent Linden Marlow Milton
Newton Oakdale Preston Ridge Salem Stanton Vale Windsor Winfield""".split()
BRAND = """Apex Atlas Aurora Beacon Castle Cobalt Comet Condor Dynamo Eagle Falcon Galaxy Gemini Helix Hermes
Jupiter Lotus Meridian Nova Omega Orbit Orion Pegasus Phoenix Pioneer Polaris Prism Saturn Summit Titan Vertex
Zenith""".split()
TRADE = "Pictures Films Studios Media".split()
COUNTRY = """Alvaria Belovia Cordania Dravia Estovia Fenland Gorvia Hestia Ilmaria Jorvik Kelland Lutania
Moravia Nordia Ostmark Pelagia Quorra Rovinia Sarvia Tamora Ulvania Vestria Wolland Zembla""".split()

# Words that a name can begin and end with where it need not sound like one.
ANY = (*FIRST, *LAST, *ADJECTIVE, *NOUN, *SITE, *TOWN, *BRAND)
POOLS = (FIRST, LAST, ADJECTIVE, NOUN, SITE, TOWN, BRAND, TRADE, COUNTRY)

RELATIONS_OF = {
    "film": ("director", "composer", "studio", "year"),
    "person": ("birth_year", "birth_city", "spouse"),
    "city": ("mayor", "country"),
    "studio": ("founder", "seat"),
    "country": ("capital",),
}
FILMS, PEOPLE, CITIES, STUDIOS, COUNTRIES = 56, 80, 16, 14, 10
NOISE = 150
# Few distinct adjectives, nouns and surnames in one world: names that share a word are what makes search noisy.
ADJECTIVES_USED, NOUNS_USED, SURNAMES_USED = 14, 24, 20
BIRTH_YEARS = range(1930, 1950)
RELEASE_YEARS = range(1960, 1980)


@dataclasses.dataclass(frozen=True)
class World:
    """What is true and what is written.

    Attributes:
      members: kind -> names; kinds are film, person, city, studio and country.
      facts: (subject, relation) -> value, all of them names or years.
      passages: in an order without meaning.
      pages: subject -> its passage, which states all of its facts.
    """

    members: Mapping[str, Sequence[str]]
    facts: Mapping[tuple[str, str], str]
    passages: Sequence[Passage]
    pages: Mapping[str, Passage]


@functools.lru_cache(maxsize=64)
def world(key: str) -> World:
    """Return the world `split/number`, from its key alone. All but those of `eval` and `dev` have names of training."""
    rng = random.Random(f"hopworld/{key}")
    split = key.split("/")[0]
    # In practice people are called by any two words. Where first names meet the same surnames again and again, a
    # decoder learns by rote which ones never meet, and reads the unseen names of evaluation as others.
    members = _members(rng, "eval" if split in ("eval", "dev") else "train", mixed=split == "practice")
    facts = _facts(rng, members)
    pages = [(name, _page(kind, name, facts)) for kind, group in members.items() for name in group]
    entries = [(name, text, True) for name, text in pages] + [(*entry, False) for entry in _noise(rng, members)]
    rng.shuffle(entries)
    passages = [Passage(f"{key}#{i}", title, text) for i, (title, text, _) in enumerate(entries)]
    return World(
        members=members,
        facts=facts,
        passages=passages,
        pages={p.title: p for p, (_, _, is_page) in zip(passages, entries, strict=True) if is_page},
    )


@functools.lru_cache(maxsize=64)
def retriever(key: str) -> BM25:
    """Return the retriever of a world's passages."""
    return BM25(world(key).passages)


def name_split(name: str) -> str:
    """Return the side, `train` or `eval`, that a combination of words is always on: one in four is for evaluation."""
    return "eval" if zlib.crc32(name.encode()) % 4 == 0 else "train"


def _members(rng: random.Random, side: str, mixed: bool) -> dict[str, list[str]]:
    def draw(first: Sequence[str], second: Sequence[str], count: int, taken: Collection[str] = ()) -> list[str]:
        names = [f"{a} {b}" for a in first for b in second if a != b]
        return rng.sample([name for name in names if name_split(name) == side and name not in taken], count)

    adjectives = rng.sample(ADJECTIVE, ADJECTIVES_USED)
    nouns = rng.sample(NOUN, NOUNS_USED)
    first = rng.sample(ANY, len(FIRST)) if mixed else FIRST
    surnames = rng.sample(ANY if mixed else LAST, SURNAMES_USED)
    members = {
        "film": draw(adjectives, nouns, FILMS),
        "city": draw(SITE, TOWN, CITIES),
        "studio": draw(BRAND, TRADE, STUDIOS),
        "country": rng.sample(COUNTRY, COUNTRIES),
    }
    taken = {name for group in members.values() for name in group}
    return members | {"person": draw(first, surnames, PEOPLE, taken)}


def _facts(rng: random.Random, members: Mapping[str, Sequence[str]]) -> dict[tuple[str, str], str]:
    """Facts of all members. Couples are symmetric; director and composer of a film are two people."""
    people, cities = members["person"], members["city"]
    facts: dict[tuple[str, str], str] = {}
    for film in members["film"]:
        facts[film, "director"], facts[film, "composer"] = rng.sample(people, 2)
        facts[film, "studio"] = rng.choice(members["studio"])
        facts[film, "year"] = str(rng.choice(RELEASE_YEARS))
    for one, other in _couples(rng, people):
        facts[one, "spouse"], facts[other, "spouse"] = other, one
    for person in people:
        facts[person, "birth_year"] = str(rng.choice(BIRTH_YEARS))
        facts[person, "birth_city"] = rng.choice(cities)
    for city, mayor in zip(cities, rng.sample(people, len(cities)), strict=True):
        facts[city, "mayor"], facts[city, "country"] = mayor, rng.choice(members["country"])
    for studio, founder in zip(members["studio"], rng.sample(people, STUDIOS), strict=True):
        facts[studio, "founder"], facts[studio, "seat"] = founder, rng.choice(cities)
    for country, capital in zip(members["country"], rng.sample(cities, COUNTRIES), strict=True):
        facts[country, "capital"] = capital
        facts[capital, "country"] = country
    return facts


def _couples(rng: random.Random, people: Sequence[str]) -> list[tuple[str, str]]:
    """Everyone's couple; none masks a third person.

    The page of Ada Marsh and Milo Kesh holds the words of Ada Kesh, and BM25 knows no word order.
    """
    known = set(people)
    while True:
        waiting = rng.sample(people, len(people))
        couples = []
        while clear := [other for other in waiting[1:] if known.isdisjoint(_swap_surnames(waiting[0], other))]:
            couples.append((waiting.pop(0), clear[0]))
            waiting.remove(clear[0])
        if not waiting:
            return couples


def _swap_surnames(one: str, other: str) -> tuple[str, str]:
    (first, last), (other_first, other_last) = one.split(), other.split()
    return f"{first} {other_last}", f"{other_first} {last}"


# As in an encyclopedia the text begins with the title, which tells a page from pages that mention its subject.
_PAGES = {
    "film": "{name}, film of {year}, director {director}, composer {composer}, studio {studio}.",
    "person": "{name}, birthyear {birth_year}, birthplace {birth_city}, spouse {spouse}.",
    "city": "{name}, city in country {country}, mayor {mayor}.",
    "studio": "{name}, studio with seat {seat}, founder {founder}.",
    "country": "{name}, country with capital {capital}.",
}


def _page(kind: str, name: str, facts: Mapping[tuple[str, str], str]) -> str:
    return _PAGES[kind].format(name=name, **{relation: facts[name, relation] for relation in RELATIONS_OF[kind]})


# Namesakes of films and people, and mentions of people and cities where nothing is asked about.
_NOISE = (
    ("{film}", "{year} song with singer {person}, record of {other}."),
    ("{film}", "{year} novel with author {person}, printed in {city}."),
    ("{surname} Prize", "award won by {person} in {year}, before by {other}."),
    ("{noun} Museum", "museum in {city}, opened {year} with guide {person}."),
    ("{person} Park", "park in {city}, drawn {year} with help of {other}."),
    ("{city} Tigers", "team with coach {person}, owner {other}."),
)


def _noise(rng: random.Random, members: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    """Title and text of the noise passages; no two are equal in title and kind."""
    entries: dict[tuple[str, int], str] = {}
    while len(entries) < NOISE:
        kind = rng.randrange(len(_NOISE))
        title, text = _NOISE[kind]
        film, city, year = rng.choice(members["film"]), rng.choice(members["city"]), rng.choice(RELEASE_YEARS)
        person, other = rng.sample(members["person"], 2)
        words = {"film": film, "city": city, "year": year, "person": person, "other": other}
        words |= {"surname": person.split()[1], "noun": film.split()[1]}
        entries.setdefault((title.format(**words), kind), text.format(**words))
    return [(title, text) for (title, _), text in entries.items()]
