"""Pools of words that names are made of, and the split of their combinations between training and evaluation.

Every word belongs to one pool, is plain ASCII, and occurs nowhere in the prose: a small tokenizer can give each its own
piece.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Collection, Sequence
from typing import Literal

NameSplit = Literal["train", "eval"]

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
_EVALUATION_ONE_IN = 4


def name_split(name: str) -> NameSplit:
    """The side that a combination of words belongs to, for ever: about one in four is kept for evaluation."""
    return "eval" if zlib.crc32(name.encode()) % _EVALUATION_ONE_IN == 0 else "train"


def draw(
    rng: random.Random,
    first: Sequence[str],
    second: Sequence[str],
    count: int,
    split: NameSplit,
    taken: Collection[str] = (),
) -> list[str]:
    """`count` different names of two words from one side of the split, none of them `taken`.

    Raises:
      ValueError: the pools hold too few combinations of that side.
    """
    names = [f"{a} {b}" for a in first for b in second if a != b]
    return rng.sample([name for name in names if name_split(name) == split and name not in taken], count)
