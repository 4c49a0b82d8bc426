"""Words of five letters, common; written for this game."""

_TEXT = """
stone bread plant chair house river light grain apple water music night paper train smile cloud
tiger beach dance sugar wheel grass horse knife lemon mouse ocean piano queen robot sheep table
uncle voice world young zebra angel brick candy dream eagle flame ghost heart igloo jelly koala
lunch magic north olive pearl quilt roast snake toast under video whale yacht bloom crown depth
earth frost globe honey ivory juice karma ledge medal nurse onion paint quiet rider scarf torch
urban visit wagon brush clock drive empty field grape hotel index jumbo kayak label motor novel
"""
WORDS = tuple(_TEXT.split())
"""Every word, the first ones where fewer are asked for."""
