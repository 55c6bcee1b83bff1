"""English words of image captions, by the part they play there."""

from __future__ import annotations


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


NUMBERS = {
    word: value
    for value, word in enumerate(
        (
            *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
            *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen"),
            *("eighteen", "nineteen", "twenty"),
        )
    )
} | {"dozen": 12, "single": 1}

SINGULAR_DETERMINERS = _words("a an one each every another this that either neither single")
PLURAL_DETERMINERS = _words("these those several many few fewer both multiple various numerous all some most")
POSSESSIVES = _words("his her its their my our your whose")
DETERMINERS = SINGULAR_DETERMINERS | PLURAL_DETERMINERS | POSSESSIVES | _words("the any half other lots")
# Indefinite quantities: "a few dogs" is not one dog.
VAGUE = _words("few several many multiple various numerous all some most lots half")

PREPOSITIONS = _words(
    "of in on at with by to from for near beside besides above below under over behind between among "
    "amongst through across along around against inside outside into onto toward towards off up down out "
    "atop beneath underneath beyond during like as than amid amidst upon past via within throughout "
    "alongside opposite next per about before after until together nearby away apart forward because if "
    "when where how instead except however"
)
AUXILIARIES = _words(
    "is are was were be been being am has have had having do does did can could will would may might "
    "must shall should 's 're 've 'm 'll 'd ca wo"
)
PRONOUNS = _words(
    "it they them he she him we us i you me who whom which what that there here itself himself herself "
    "themselves something someone everything everyone anything anyone nothing none nobody others ones "
    "theirs"
)
CONJUNCTIONS = _words("and or nor but yet & while whereas although though so then plus")
NEGATIONS = _words("not n't never cannot without")
DENYING_VERBS = _words("lacks lack lacked lacking minus excludes excluding")

# Adverbs without -ly; inside a phrase they lead an attribute ("a very large circle").
ADVERBS = _words("very really quite too only just also almost rather even again already now more most less")
NOT_ADVERBS = _words(
    "butterfly fly family lily belly jelly ugly friendly curly woolly bully early silly assembly elderly "
    "supply lovely lonely lively holly italy july ally rally gully curly bubbly wooly hilly furry chilly "
    "smelly sly"
)

COLORS = _words(
    "red green blue yellow purple orange cyan black white pink brown gray grey magenta violet turquoise "
    "teal gold golden silver beige tan maroon navy lime olive dark light bright pale colorful colourful "
    "multicolored"
)
SIZES = _words("small large big little tiny huge tall short long wide narrow giant medium thin thick")
MATERIALS = _words(
    "rubber metal glass metallic shiny matte wood wooden plastic steel stone brick concrete leather "
    "paper cloth bamboo marble ice cardboard straw iron bronze copper clay wool cotton silk velvet "
    "wicker porcelain ceramic granite stainless gold silver"
)
PATTERNS = _words("striped dotted checkered chequered spotted plaid patterned plain solid speckled polka-dot")
ATTRIBUTES = (
    COLORS
    | SIZES
    | MATERIALS
    | PATTERNS
    | _words("young old new wet dry round open closed empty full clean dirty happy sad hot cold fresh ripe")
)
# Attributes that are things as well: "a glass sits on the table".
THINGS_TOO = _words("glass orange metal rubber wood stone brick paper cloth straw iron ice gold silver light")

# After "is" these do not describe a thing but say that it is there, or where.
EXISTENCE = _words(
    "present visible shown included seen featured depicted displayed here there found contained pictured "
    "in available detected apparent evident noticeable"
)
ABSENCE = _words("absent missing nowhere gone lacking")
NO_ATTRIBUTE = (
    EXISTENCE
    | ABSENCE
    | _words("full next left right able ready close near far away similar different due busy covered filled alone same")
)

# "a group of people": one phrase, and its head is what the group is of.
COLLECTIVES = _words(
    "group bunch pair couple lot lots number variety herd flock crowd pile row stack set collection "
    "bouquet array assortment series line team dozen dozens hundreds kind type sort cluster handful"
)
# "a cup of coffee": one phrase, and its head is the container or part.
CONTAINERS = _words(
    "cup glass bottle bowl plate slice piece bag box basket can jar loaf sheet bar pot pan tray mug "
    "pitcher carton chunk block bucket pint bit patch body field vase ball roll"
)
# After a noun these do not start what it does: "a cream colored couch".
COMPOUNDING = _words("colored coloured shaped looking sized themed flavored tipped")
# Plural in form as the first part of a compound.
S_MODIFIERS = _words("sports clothes goods arms glasses news athletics gymnastics")
PAIRED = _words("scissors pants jeans glasses sunglasses shorts binoculars pliers goggles tweezers headphones trousers")
SIGNS = _words("sign signs trace traces hint evidence")

IMAGES = _words("photo photograph picture image scene pic snapshot photos pictures images frame")
MEDIUMS = _words("drawing painting illustration rendering render sketch cartoon shot view close-up closeup")
IMAGE_MODIFIERS = _words("rendered synthetic computer generated simple close-up closeup up close blurry stock")
SHOWING = _words(
    "of with without showing shows depicting depicts featuring features containing contains that which "
    "including includes displaying displays has where in is"
)

SIDES = _words(
    "left right top bottom side sides front back middle center centre edge end rear corner background "
    "foreground distance leftmost rightmost"
)
SIDE_MODIFIERS = _words("far upper lower bottom top very left right hand left-hand right-hand opposite other near")
# Fixed expressions that hold a noun but no thing.
IDIOMS = tuple(
    tuple(phrase.split())
    for phrase in (
        *("next to", "close to", "in front of", "on top of", "in back of", "in between", "side by side"),
        *("each other", "one another", "in sight", "in view", "in frame", "left of", "right of", "in total"),
        *("in use", "in motion", "at all", "at least", "no longer", "up close", "at night", "in line"),
        *("in progress", "on display", "out of view", "out of sight", "as well as", "such as"),
        *("in addition to", "in need of", "upside down", "kind of", "a lot", "anywhere in sight"),
        *("to be seen", "to be found"),
    )
)

ING_NOUNS = _words(
    "ring rings king wing wings string building buildings ceiling morning evening painting paintings "
    "clothing railing awning pudding wedding icing spring thing things sling earring sibling dumpling "
    "lightning topping frosting crossing drawing landing swing parking living dining bedding fencing "
    "stuffing seasoning"
)
ED_NOUNS = _words("bed beds shed sled seed weed speed breed hundred bled tweed reed creed steed feed moped")
PARTICIPLES = _words(
    "made worn seen shown held hung built drawn lit torn taken given eaten thrown ridden driven written "
    "set kept blown fallen stuck sat stood ran rode flew ate wore drove gave took threw swam spread bent "
    "broken frozen hidden woven shorn laid caught left found swung sprung wound bound fed cut shot split "
    "put"
)
VERBS = _words(
    "sit stand ride hold wear walk play eat look fly run lie lay jump hit throw catch talk drive pull "
    "push carry watch face surround fill cover hang lean rest sleep graze swim ski skate surf move stop "
    "wait pose smile laugh prepare use read write drink feed chase follow stare peek pass travel take "
    "get give make go come show display feature contain include depict see appear seem float grow battle "
    "fight wash brush kiss hug lick bite swat reach sail slide climb dig kick shine sing dance kneel "
    "squat crouch say have nap grab enjoy try roll perform need bend arrive beg sail land"
)
# Nouns as well: verbs only after "not", "does" or a plural ("women ride", not "a ride").
NOUNS_TOO = _words(
    "use face rest play run ride walk catch show display feature fight watch brush drink stand look jump "
    "throw talk drive pull push surround cover hang sleep ski surf move stop wait smile laugh read feed "
    "peek pass travel need bend sail land kiss lick bite reach slide climb kick shine dance dress nap "
    "roll float"
)
VERB_BASES = VERBS - NOUNS_TOO
VERB_FORMS_S = frozenset(
    form for verb in VERBS for form in (verb + "s", verb + "es", verb[:-1] + "ies" if verb[-1] == "y" else verb + "s")
)
