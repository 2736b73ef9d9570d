"""Word lists of the generated tasks: every entry is one word, so that it can be one token."""

NAMES = (
    "Adam Alice Amir Anna Ben Bella Carl Chloe Clara Dan Diana Dylan Elena Emma Eric Esther Finn "
    "Fiona Frank Gina Grace Greg Hana Harry Helen Henry Ian Ines Iris Ivan Jack Jane Jonas Julia "
    "Kai Karen Kate Kevin Laura Leo Liam Lucy Maria Mark Maya Mia Nadia Nick Nina Noah Olga Olivia "
    "Oscar Paul Petra Quinn Rachel Rita Robert Rosa Sam Sara Sofia Steve Tina Tom Uma Vera Victor "
    "Wendy Will Xenia Yara Yusuf Zoe"
).split()

OBJECTS = (
    "apples badges balls bananas beads berries books bottles boxes bricks brushes buttons cakes "
    "candles cards carrots chairs cherries coins cookies crayons cups dolls eggs feathers figs "
    "flags flowers forks grapes hats jars keys kites lamps leaves lemons letters magnets maps "
    "marbles melons muffins mugs nails nuts olives onions oranges pearls pears pencils pens "
    "pillows pins plates plums potatoes rings rocks ropes shells shirts socks spoons stamps "
    "stickers stones tickets tiles tomatoes toys tulips"
).split()

LETTERS = "A B C D E F G H J K L M N P Q R S T U V W X Y Z".split()

GAINS = "buys finds gets picks wins collects receives".split()
LOSSES = "loses sells drops breaks donates returns".split()
