"""The raw material of the workloads: prose, Python functions with what can be renamed and changed in them, topics and words.
All of it written for this project, so that no model has it by heart. Data only.
"""

from __future__ import annotations

from typing import NamedTuple

PROSE = (
    "The ferry left the north pier a little after six, carrying eleven passengers, two bicycles and a crate of seed "
    "potatoes. Fog lay flat on the water, so the pilot steered by the bell on Marren Rock and by the smell of kelp that "
    "meant the shallows were near. Nobody spoke much. A woman in a yellow coat was mending a glove, and a boy counted the "
    "seconds between the bell's strokes, announcing every tenth one as though it were a station on a railway.",
    "Our bakery keeps three ovens, and each of them has its own temper. The oldest runs hot at the back, so rye goes there,"
    " turned once after twenty minutes. The middle oven is patient and takes the milk bread. The newest one has a glass "
    "door and a timer that nobody trusts, because it rings early on cold mornings. Oda writes the real times on the flour "
    "bins in chalk, and by noon the figures are smudged past reading.",
    "In the second year of the survey we found that the hedges along the canal held more nests than the orchard did, "
    "although the orchard had been planted for exactly that purpose. Wrens took the lowest branches, blackbirds the forks "
    "at shoulder height, and a single pair of goldfinches chose a lamp post. We stopped predicting after that and began to "
    "draw maps, one for every month, with a dot for each nest and a ring for each brood.",
    "The library moved its maps to the cellar in the week of the storm. Forty-one drawers went down the stairs on a "
    "mattress, with Mr. Teale calling the turns. Most of the sheets were river charts from the last century, brittle at the"
    " folds. When the lights failed we carried on with a bicycle lamp, and that is how the drawer marked Q came to be "
    "shelved under the boiler, where it stayed, warm and unread, for nineteen years.",
    "Before a kiln is opened it has to be listened to. A kiln that has cooled is silent; one that has not ticks like a "
    "hedge full of insects. Petra waits until she has heard nothing for the length of one song, then lifts the first brick "
    "with tongs. The glaze she calls harbour green comes out grey on the rim and blue in the well of the bowl, and she has "
    "never been able to say why, only that it needs ash from plum wood.",
    "Night trains used to stop at Hollin Junction for water, and the stop was just long enough to buy soup. The stall had "
    "two pots: barley with leek, and something red that changed with the season. Regular travellers carried their own cups."
    " A conductor named Ismet kept a list of who still owed money, written in pencil on the inside of his cap, and when he "
    "retired the cap was framed and hung beside the timetable.",
    "To mark out the new garden they used string, eleven pegs and an old door laid flat as a table. The path was to be as "
    "wide as the wheelbarrow and a hand more. Beans would climb the south wall, and the shady corner was left to mint, "
    "which would have taken it anyway. By evening the whole plan stood in the grass as thin white lines, and a neighbour "
    "asked politely whether a kite had come down.",
    "Each lighthouse on the coast had its own rhythm so that a sailor could tell them apart by counting. Skerry Head gave "
    "two short flashes and a long dark; Brand Point gave one flash every nine seconds. The lamp at Tollen was the odd one, "
    "because its motor ran slow in winter. Pilots knew this, and in January they subtracted a second without thinking, the "
    "way one steps over a loose stair in a familiar house.",
)


class Function(NamedTuple):
    """Source of a Python function; renames: (old, new) names of variables in it; edits: instructions that change some lines."""

    source: str
    renames: tuple[tuple[str, str], ...]
    edits: tuple[str, ...]


FUNCTIONS = (
    Function(
        "def average_speed(points):\n"
        "    total_distance = 0.0\n"
        "    total_time = 0.0\n"
        "    for index in range(1, len(points)):\n"
        "        previous = points[index - 1]\n"
        "        current = points[index]\n"
        "        total_distance += abs(current[1] - previous[1])\n"
        "        total_time += current[0] - previous[0]\n"
        "    if total_time == 0:\n"
        "        return 0.0\n"
        "    return total_distance / total_time\n",
        (("total_distance", "metres"), ("total_time", "seconds"), ("previous", "before"), ("points", "samples")),
        (
            "raise a ValueError instead of returning 0.0 when total_time is 0",
            "multiply the result by 3.6 before returning it",
            "add a docstring that says what the function returns",
        ),
    ),
    Function(
        "def group_orders(orders, limit=10):\n"
        "    groups = {}\n"
        "    for order in orders:\n"
        "        customer = order['customer']\n"
        "        if customer not in groups:\n"
        "            groups[customer] = []\n"
        "        if len(groups[customer]) < limit:\n"
        "            groups[customer].append(order['amount'])\n"
        "    totals = {}\n"
        "    for customer in groups:\n"
        "        totals[customer] = sum(groups[customer])\n"
        "    return totals\n",
        (("groups", "amounts_by_customer"), ("customer", "client"), ("totals", "sums"), ("limit", "most")),
        (
            "change the default of limit from 10 to 50",
            "skip every order whose amount is below zero",
            "return the totals sorted by customer",
        ),
    ),
    Function(
        "def parse_settings(text):\n"
        "    settings = {}\n"
        "    for number, line in enumerate(text.splitlines()):\n"
        "        line = line.strip()\n"
        "        if not line or line.startswith('#'):\n"
        "            continue\n"
        "        if '=' not in line:\n"
        "            raise ValueError('line %d has no equals sign' % number)\n"
        "        name, value = line.split('=', 1)\n"
        "        settings[name.strip()] = value.strip()\n"
        "    return settings\n",
        (("settings", "options"), ("number", "row"), ("name", "key"), ("text", "source")),
        (
            "also treat lines that start with ';' as comments",
            "start counting the lines at 1 instead of 0",
            "turn every name into lower case before storing it",
        ),
    ),
    Function(
        "def longest_run(values):\n"
        "    best_length = 0\n"
        "    best_value = None\n"
        "    length = 0\n"
        "    last = None\n"
        "    for value in values:\n"
        "        if value == last:\n"
        "            length += 1\n"
        "        else:\n"
        "            length = 1\n"
        "        if length > best_length:\n"
        "            best_length = length\n"
        "            best_value = value\n"
        "        last = value\n"
        "    return best_value, best_length\n",
        (("best_length", "record"), ("best_value", "winner"), ("last", "previous_value"), ("length", "count")),
        (
            "prefer the later run when two runs have the same length",
            "return only best_length",
            "ignore values that are None",
        ),
    ),
    Function(
        "def schedule(tasks, workers):\n"
        "    queue = sorted(tasks, key=lambda task: task.minutes, reverse=True)\n"
        "    loads = [0] * workers\n"
        "    plan = [[] for _ in range(workers)]\n"
        "    for task in queue:\n"
        "        worker = loads.index(min(loads))\n"
        "        plan[worker].append(task.name)\n"
        "        loads[worker] += task.minutes\n"
        "    longest = max(loads)\n"
        "    return plan, longest\n",
        (("queue", "waiting"), ("loads", "busy_minutes"), ("plan", "assignments"), ("longest", "finish")),
        (
            "return an empty plan and 0 when there are no tasks",
            "take the shortest task first instead of the longest",
            "return loads instead of longest",
        ),
    ),
    Function(
        "def wrap_words(text, width):\n"
        "    lines = []\n"
        "    current = ''\n"
        "    for word in text.split():\n"
        "        if not current:\n"
        "            current = word\n"
        "        elif len(current) + 1 + len(word) <= width:\n"
        "            current = current + ' ' + word\n"
        "        else:\n"
        "            lines.append(current)\n"
        "            current = word\n"
        "    if current:\n"
        "        lines.append(current)\n"
        "    return lines\n",
        (("lines", "rows"), ("current", "pending"), ("word", "piece"), ("width", "columns")),
        (
            "give width a default of 72",
            "return one string with a line break between the lines",
            "raise a ValueError when width is less than 1",
        ),
    ),
    Function(
        "class Meter:\n"
        "    def __init__(self, start):\n"
        "        self.reading = start\n"
        "        self.history = [start]\n"
        "\n"
        "    def update(self, amount):\n"
        "        if amount < 0:\n"
        "            raise ValueError('amount is negative')\n"
        "        self.reading += amount\n"
        "        self.history.append(self.reading)\n"
        "        return self.reading\n"
        "\n"
        "    def used_since(self, position):\n"
        "        return self.reading - self.history[position]\n",
        (("reading", "level"), ("history", "log"), ("amount", "units"), ("position", "mark")),
        (
            "give start a default of 0",
            "also refuse an amount of zero",
            "add a method reset that sets reading to 0",
        ),
    ),
    Function(
        "def merge_ranges(ranges):\n"
        "    ordered = sorted(ranges)\n"
        "    merged = [ordered[0]]\n"
        "    for start, end in ordered[1:]:\n"
        "        last_start, last_end = merged[-1]\n"
        "        if start <= last_end:\n"
        "            merged[-1] = (last_start, max(last_end, end))\n"
        "        else:\n"
        "            merged.append((start, end))\n"
        "    return merged\n",
        (("ordered", "by_start"), ("merged", "result"), ("last_end", "reach"), ("ranges", "spans")),
        (
            "return an empty list when ranges is empty",
            "also merge ranges that touch, so that (1, 2) and (3, 4) become (1, 4)",
            "skip every range whose end is before its start",
        ),
    ),
)

TOPICS = (
    "why the sky is blue", "how a bicycle stays upright", "what a hash table is", "why bread rises", "how tides come about",
    "what inflation means", "how a refrigerator cools", "why leaves change colour", "how vaccines work", "what a compiler does",
    "how rainbows form", "why we sleep", "how a microphone works", "what makes soil fertile", "how stars are born",
    "why metals conduct electricity", "how the internet finds an address", "what a leap year is for", "how bees make honey",
    "why ice floats", "how glass is made", "what a budget is good for", "how a lock works", "why volcanoes erupt",
    "how a camera records light", "what a virus is", "how clouds carry water", "why the seasons change", "how paper is made",
    "what friction does", "how a sail pulls a boat", "why onions make us cry",
)  # fmt: skip

READERS = (
    "a curious child of ten", "an adult who has never studied it", "a teacher who has to explain it tomorrow",
    "somebody who is in a hurry", "a friend who does not quite believe it", "a pupil before an examination",
    "a journalist who writes for everybody", "an old man who likes stories", "a visitor of a museum",
    "an engineer of another field", "a class of twelve-year-olds", "somebody who learns the language", "a traveller on a train",
    "a new colleague", "a sceptical neighbour", "a listener of the radio",
)  # fmt: skip

WORDS = (  # noqa: SIM905
    "amber anchor apple arrow attic basin beacon bell birch blanket bottle bridge brook button cabin candle canyon "
    "carpet castle cedar cherry circle clay cloud copper coral cotton cradle crystal curtain dagger desert dune eagle "
    "echo ember fabric falcon feather fern ferry fiddle flute forest fountain fox garden garlic glacier glove granite "
    "grove hammer harbor hazel helmet heron hill honey hook island ivory jacket jewel kettle kite ladder lantern "
    "laurel lemon linen lizard magnet maple marble meadow melon mirror moss needle nickel oak oar olive onion orchard "
    "otter owl paddle paper pebble pepper pillow pine planet plum pocket prairie quarry quilt rabbit raven ribbon "
    "river rocket rope saddle sand shadow shell silver spoon stone "
).split()
