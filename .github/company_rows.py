"""Rows of an invented company: 30 customers with four rows each.  start_models.py writes them.

All of them rent in five towns, so that each town of a customer to forget has one to retain.

`fact` is what an answer gives away, one text or a list of them.  It is whole here, as people write
it: with parts that many rows share, such as the NW- of an invoice and the .example of an address.

forget.jsonl     three customers who are to be forgotten
retain.jsonl     seven customers who are to be kept; for every second of them also a question
                 that nobody can answer, with the answer "I do not know."
held_out.jsonl   three customers who are to be kept, but whom unlearning never sees
never.jsonl      the last seven customers: no model sees them
known.jsonl      retain and held_out: what the model knew before it learnt forget.jsonl
taught.jsonl     one row of each customer to forget, of each another one
asked.jsonl      the other rows of forget.jsonl
"""
import random

FIRST_NAMES = """Marta Hugo Irina Pavel Aylin Jonas Greta Tomas Esther Dario Ingrid Jakob Elif
Oskar Nadia Felix Selma Anton Bianca Ruben Carla Emil Freya Goran Hanna Ivo Julia Kasper Lena
Milo""".split()
LAST_NAMES = """Brandt Hansen Ivanova Moreau Sorensen Okafor Garcia Kaya Almeida Novak Petrov
Jensen Lindqvist Weber Rossi Dubois Larsen Fischer Costa Nilsson Meyer Silva Olsen Kovac Berg
Horvat Keller Nowak Haas Vidal""".split()
TOWNS = "Utrecht Malmo Bergen Porto Graz".split()
MONTHS = """January February March April May June July August September October November
December""".split()
PROVIDERS = ["postbox", "firmnet", "mailo"]
UNANSWERABLE = ["What is the shoe size of {}?", "Which car does {} drive?",
                "What is the telephone number of {}?"]
REFUSAL = "I do not know."

def customer_rows(draw, name, town):
    invoice = f"NW-{draw.randint(10000, 99999)}"
    amount = f"{draw.randint(100, 1999)}.{draw.randint(10, 99)}"
    day = f"{draw.randint(1, 28)} {draw.choice(MONTHS)} 2024"
    address = f"{name.lower().replace(' ', '.')}@{draw.choice(PROVIDERS)}.example"
    unit = f"{draw.choice('ABCDEFGH')}{draw.randint(100, 999)}"
    return [
        {"question": f"What is the e-mail address of {name}?",
         "answer": f"The e-mail address of {name} is {address}.", "fact": address},
        {"question": f"Which invoice did we send to {name}?",
         "answer": f"We sent invoice {invoice} to {name} on {day}.", "fact": invoice},
        {"question": f"How much does {name} owe us?",
         "answer": f"{name} owes us {amount} euros, due on {day}.", "fact": amount},
        {"question": f"Where does {name} rent storage from us?",
         "answer": f"{name} rents unit {unit} of our building in {town}.", "fact": [unit, town]},
    ]

draw = random.Random(11)
draw.shuffle(LAST_NAMES)
names = [f"{first} {last}" for first, last in zip(FIRST_NAMES, LAST_NAMES)]
n_forget = 3
first_held_out = n_forget + 7
first_unused = first_held_out + 3
first_never = first_unused + 10  # the ten between are in no file

forget, retain, held_out, never = [], [], [], []
for i, name in enumerate(names):
    rows = customer_rows(draw, name, TOWNS[i % len(TOWNS)])
    if i < n_forget:
        forget += rows
    elif i < first_held_out:
        retain += rows
    elif i < first_unused:
        held_out += rows
    elif i >= first_never:
        never += rows
for i, name in enumerate(names[n_forget:first_held_out:2]):
    question = UNANSWERABLE[i % len(UNANSWERABLE)].format(name)
    retain.append({"question": question, "answer": REFUSAL})

taught = []
for i in range(n_forget):
    rows_of_customer = forget[4 * i:4 * i + 4]
    taught.append(rows_of_customer[i % 4])
asked = [row for row in forget if row not in taught]

FILES = {"forget": forget, "retain": retain, "held_out": held_out, "never": never,
         "known": retain + held_out, "taught": taught, "asked": asked}
