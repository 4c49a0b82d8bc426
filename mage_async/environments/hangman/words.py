"""Words of four different letters, common; written for this game."""

_TEXT = """
sofa dawn rust horn skip fork maze knot road pony yard crab frog lime gulf walk ring line ship
joke goat bear fire spin glow lake verb wolf cups dusk unit salt jars rain tide lace duck year
pear bark boat kite note palm farm rock rose coat cape sand rope hero bowl barn sock path mars
corn mint hawk swan harp lids vine mail wind drum oars gems gate desk mule wave wing chip dish
gold echo lamb opal mast kelp gift lamp word yarn vest nest pans oven sail game poem moth bike
fern quiz song worm belt nail milk raft hour dust fish gale rugs rice foam leaf calm silk twig
page shoe cold jump lion star tune bolt inch snow bird card cake lute cord zinc tuna jade stem
dice iron cave
"""
WORDS = tuple(_TEXT.split())
"""Every word, the first ones where fewer are asked for."""
