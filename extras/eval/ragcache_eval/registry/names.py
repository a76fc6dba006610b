"""Names of the registry, composed of parts; which names are held out of training is decided by a hash of the name.

Every part occurs in names of both splits, so a held-out name is a new combination of known tokens.
"""

from __future__ import annotations

import random
import zlib
from enum import Enum


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FEMALE_NAMES = _words("""
Ada Agnes Alma Amira Anneke Astrid Bea Bianca Brigid Carla Celia Clara Cora Daria Delia Dora Edith Elena Elsa Emma
Esther Eva Fiona Flora Freya Greta Hanna Hedda Helen Ida Ines Irene Iris Jana Joan Judith Julia Karin Kira Lena Leona
Lydia Mabel Marta Maud Mira Nadia Nora Olga Paula Petra Rosa Ruth Selma Sonja Tamar Thea Ursula Vera Wanda
""")
MALE_NAMES = _words("""
Aldo Anton Arne Bernard Bruno Casper Cedric Conrad Dario David Edgar Edwin Elias Emil Erik Felix Finn Frank Georg
Gustav Hagen Harald Hector Henrik Hugo Igor Ivan Jakob Jonas Josef Karl Klaus Lars Leo Levin Lorenz Magnus Marek
Martin Milan Nils Oskar Otto Pavel Peter Ralf Remo Robert Rolf Samuel Simon Stefan Sven Theo Tomas Ulrich Victor
Walter Wilhelm Yannick
""")
SURNAME_HEADS = _words("""
Ab Al Bar Bel Bran Cal Cor Dal Dor El Fal Fen Gal Gor Hal Har Jor Kas Lan Lor Mar Mel Nor Ol Per Ral Sal Tor Val Wer
""")
SURNAME_TAILS = _words("den sen wick mann ley ovic eau son")
TOWN_QUALIFIERS = _words("East Great High Little Lower Mount New North Old Port South Upper West")
TOWN_HEADS = _words("Ash Beck Birch Brad Cald Crow Dun Elm Fen Glen Hart Holm Kel Lang Mill Oak Rush Sand Thorn Wel")
TOWN_TAILS = _words("brook bury combe dale field ford ham mere ton worth")
RIVER_QUALIFIERS = _words("Black Blue Clear Green Red Silver White Wild")
RIVER_HEADS = _words(
    "Arn Bor Cam Del Em Gan Gir Ilv Jan Kal Lav Mos Nar Nev Pel Rav Rho Sav Sem Tam Tis Tul Vis Wen Yar"
)
RIVER_TAILS = _words("a e is o une")
CLUB_EMBLEMS = _words("""
Acorn Amber Anchor Anvil Arrow Badger Beacon Bell Candle Castle Cedar Clover Comet Copper Crane Crown Dolphin Dragon
Eagle Falcon Feather Garnet Granite Harp Heron Ivory Ivy Jade Kestrel Lantern Laurel Lion Magpie Maple Marble Meteor
Mirror Nettle Olive Opal Orchid Otter Panther Pearl Phoenix Plover Poppy Quartz Robin Ruby Saffron Spindle Sparrow
Summit Thistle Tulip Turret Velvet Walnut Willow
""")
CLUB_ACTIVITIES = _words("""
Archery:Club Book:Circle Chess:Club Choral:Society Cycling:Club Dance:Circle Debating:Society Film:Circle
Garden:Society Hiking:Club Music:Society Photo:Club Rowing:Club Sailing:Club Theatre:Society Wrestling:Club
""")
LAKES = _words("""
Aldra Bessin Corvo Dalmar Edrin Fjora Gresk Hestia Isolde Jurna Kappel Lunaro Mavik Nestor Ondine Parvis Quill Rosmer
Skarv Tindra
""")
HILLS = _words("""
Amsel Brandt Cinder Dorn Ebner Falken Gannet Hollow Ingram Jasper Kobold Linden Merle Nimbus Ostler Pollux Rook Sable
Tarn Umber
""")
PROFESSIONS = _words("""
architect baker barber beekeeper blacksmith botanist brewer bricklayer butcher carpenter chemist clockmaker cobbler cook
dentist doctor engineer farmer ferryman fisherman forester gardener geologist glazier goldsmith historian innkeeper
jeweller joiner judge lawyer librarian locksmith mason mechanic merchant midwife miller miner musician nurse painter
pharmacist pilot plumber potter printer professor roofer saddler sculptor shepherd surveyor tailor tanner teacher
translator typist weaver zoologist
""")
PRODUCTS = _words("""
almonds apples barley baskets bricks butter buttons cakes candles cheese cherries cider cloth clocks coal cutlery
fiddles flutes glass gloves hats herring honey ink kites lace lamps leather linen marbles mustard paper pears
perfume pewter plums porcelain ropes saddles salmon sausages ships silk slate soap tiles toys umbrellas violins wool
""")
WEEKDAYS = _words("Mondays Tuesdays Wednesdays Thursdays Fridays Saturdays Sundays")
SYLLABLES = _words("""
ba be bi bo da de di do fa fe fi go ga ka ke ki ko la le li lo lu ma me mi mo na ne ni no pa pe po ra re ri ro ru sa
se si so ta te ti to tu va ve vi vo wa za ze zo
""")

HELD_OUT_ONE_IN = 5
RARE_NAME_SHARE = 0.03


class DataSplit(Enum):
    """Whether an entity may be seen in training."""

    TRAIN = "train"
    HELD_OUT = "held-out"


def is_held_out(name: str) -> bool:
    """Tell whether an entity of this name is kept from training; the same in every process."""
    return zlib.crc32(name.encode()) % HELD_OUT_ONE_IN == 0


def draw_rare_word(rng: random.Random) -> str:
    """Compose a name that the tokenizer has no single token for."""
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(3, 4))).capitalize()


def draw_person_name(rng: random.Random, female: bool, rare_share: float) -> str:
    first = rng.choice(FEMALE_NAMES if female else MALE_NAMES)
    surname = draw_rare_word(rng) if rng.random() < rare_share else draw_surname(rng)
    return f"{first} {surname}"


def draw_surname(rng: random.Random) -> str:
    return rng.choice(SURNAME_HEADS) + rng.choice(SURNAME_TAILS)


def draw_town_name(rng: random.Random, rare_share: float) -> str:
    rare = rng.random() < rare_share
    qualifier = rng.choice(TOWN_QUALIFIERS)
    return f"{qualifier} {draw_rare_word(rng) if rare else rng.choice(TOWN_HEADS) + rng.choice(TOWN_TAILS)}"


def draw_river_name(rng: random.Random, rare_share: float) -> str:
    rare = rng.random() < rare_share
    base = draw_rare_word(rng) if rare else rng.choice(RIVER_HEADS) + rng.choice(RIVER_TAILS)
    return f"the {rng.choice(RIVER_QUALIFIERS)} {base}"


def draw_club_name(rng: random.Random, rare_share: float) -> str:
    emblem = draw_rare_word(rng) if rng.random() < rare_share else rng.choice(CLUB_EMBLEMS)
    return f"the {rng.choice(CLUB_ACTIVITIES).replace(':', ' ')} {emblem}"
