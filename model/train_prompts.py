"""Prompts from templates, for domains that collections of problems leave out; the target answers them."""

import random

# {topic} and the like are drawn from SLOTS and FUNCTIONS.
TEMPLATES = {
    "chat": (
        "What is {topic}, and why does it matter?",
        "Explain {topic} to {reader} in a few sentences.",
        "What are the advantages and disadvantages of {topic}?",
        "Compare {topic} with {other_topic}. How do they differ?",
        "Give me {number} tips for {activity}.",
        "List {number} things to know before {activity}.",
        "Write a short story about {character} who discovers {thing}.",
        "Write a short poem about {thing}.",
        "Write a short email to {person} about {matter}.",
        "Write an outline for a blog post about {activity}. Keep it under 200 words.",
        "Rewrite this sentence in a {tone} tone: \"{sentence}\"",
        "Correct the grammar of this sentence and explain the change: \"{sentence}\"",
        "Translate into {language}: \"{sentence}\"",
        "Summarize in one paragraph what people should know about {topic}.",
        "Pretend to be {character}. What do you think about {topic}?",
        "You are {character}. Introduce yourself and answer: how would you start {activity}?",
        "Is {topic} a greater influence on our lives than {other_topic}? Give reasons.",
        "If {thing} costs ${number} and the price rises by 20 percent, what does it cost now? Explain.",
        "Extract the names and places from this text: \"{sentence} It was told by {character} near Lisbon.\"",
        "Describe {thing} as if {reader} had never seen one.",
        "What would happen if there were no {topic}? Give three consequences.",
        "{character} has {number} boxes with {number} apples each and gives two apples away. How many are left?",
        "Write a persuasive essay of two paragraphs for {reader} on {topic}.",
        "Give an example of {topic} and explain how it relates to {other_topic}.",
        "Write a dialogue between {character} and {person} about {topic}.",
        "Which three books or films would you recommend to someone interested in {topic}, and why?",
        "Plan {activity} day by day for one week.",
        "Write a product description for {thing} in a {tone} tone.",
        "Is the tone of this review positive, neutral or negative? \"{sentence} I would not come back.\" Explain.",
        "Write instructions, step by step, for {activity} that {reader} can follow.",
    ),
    "code": (
        'def {function}:\n    """ {does}\n    """\n',
        "Write a Python function `{function}` that does this: {does}",
        'from typing import List\n\n\ndef {function}:\n    """ {does}\n    """\n',
        "How do I do this in {programming}? {does}",
        'Complete this Python function:\n\ndef {function}:\n    """{does}"""\n',
        "Write a class in {programming} for {structure}, with a short usage example.",
        'def {function}:\n    """\n    {does}\n    It must not change its arguments.\n    """\n',
        "Explain step by step how to implement {structure} in {programming}.",
        'import math\n\n\ndef {function}:\n    """{does}\n    """\n',
        "Write a unit test in Python for `{function}`. {does}",
    ),
}
SLOTS = {
    "topic": (
        "photosynthesis", "inflation", "machine learning", "the French Revolution", "plate tectonics", "gravity",
        "the immune system", "supply and demand", "democracy", "renewable energy", "the water cycle", "jazz music",
        "the Renaissance", "evolution", "public transport", "remote work", "the stock market", "sleep", "antibiotics",
        "the theory of relativity", "artificial intelligence", "climate change", "probability", "social media",
        "volcanoes", "the Roman Empire", "quantum mechanics", "DNA", "taxes", "the solar system", "chess", "ocean currents",
        "black holes", "advertising", "human rights", "electric cars", "the printing press", "vaccines", "databases",
        "the Industrial Revolution", "meditation", "globalization", "encryption", "genetic engineering", "Shakespeare",
        "the human heart", "magnetism", "insurance", "impressionist painting", "economic growth", "space travel",
    ),
    "reader": ("a ten-year-old", "a beginner", "a busy manager", "a visitor from another planet", "a student"),
    "number": ("3", "4", "5", "7", "10"),
    "activity": (
        "learning a new language", "moving to another city", "cooking for a large family", "preparing a job interview",
        "saving money", "running a marathon", "writing a novel", "growing tomatoes", "giving a speech",
        "planning a trip to Japan", "adopting a dog", "studying for an exam", "starting a small business",
    ),
    "character": (
        "a retired sailor", "a young inventor", "a curious robot", "an old librarian", "a medieval knight",
        "a detective", "a chef", "a space explorer", "a talking cat", "a history teacher", "a doctor",
    ),
    "thing": (
        "a hidden garden", "an old lighthouse", "a bicycle", "a mysterious letter", "a thunderstorm", "a silver key",
        "a telescope", "a forgotten village", "a violin", "the first snow", "a paper boat", "a coffee machine",
    ),
    "person": ("a colleague", "my landlord", "a customer", "my professor", "the city council", "a friend"),
    "matter": (
        "a delayed delivery", "next week's meeting", "a broken heater", "an invitation to dinner", "a new idea",
        "a job application", "thanking them for their help", "a change of plans",
    ),
    "tone": ("formal", "friendly", "funny", "persuasive", "simple"),
    "sentence": (
        "The meeting has been moved to Friday because of the storm.", "She don't know where the keys is.",
        "We are sorry that your order arrived late.", "The old bridge was closed after the flood last year.",
        "He gave up his job to travel around the world.", "Our team finished the project two weeks early.",
        "I seen the movie yesterday and it were great.", "The children played in the park until it was dark.",
    ),
    "language": ("French", "Spanish", "German", "Italian"),
    "programming": ("Python", "JavaScript", "C++", "Java", "SQL"),
    "structure": ("a stack", "a queue", "a linked list", "a binary tree", "a hash map", "a bank account", "a matrix"),
}  # fmt: skip
FUNCTIONS = {
    "count_vowels(text: str) -> int": "Return how many vowels the text has.",
    "largest_gap(numbers: List[int]) -> int": "Return the largest difference between two neighbours.",
    "is_sorted(items: list) -> bool": "Check whether no item is smaller than the one before it.",
    "merge_counts(a: dict, b: dict) -> dict": "Add up the counts of two dictionaries, key by key.",
    "running_mean(numbers: List[float]) -> List[float]": "Return the mean of the first 1, 2, 3 and more numbers.",
    "unique_words(text: str) -> List[str]": "Return the different words of a text in alphabetical order.",
    "digit_sum(n: int) -> int": "Return the sum of the decimal digits of n.",
    "rotate_left(items: list, k: int) -> list": "Move the first k items to the end of the list.",
    "longest_word(text: str) -> str": "Return the longest word of a text; of several the first one.",
    "second_largest(numbers: List[int]) -> int": "Return the second largest of the different numbers.",
    "caesar(text: str, k: int) -> str": "Shift every letter of the text by k places in the alphabet.",
    "transpose(matrix: List[List[int]]) -> List[List[int]]": "Exchange the rows and columns of a matrix.",
    "is_leap_year(year: int) -> bool": "Check whether a year has 366 days.",
    "remove_duplicates(items: list) -> list": "Keep the first of equal items and drop the others.",
    "sum_of_evens(numbers: List[int]) -> int": "Return the sum of all even numbers in the list.",
    "is_palindrome(text: str) -> bool": "Check whether the text reads the same backwards.",
    "most_frequent(items: list)": "Return the item that occurs most often; of several the first one.",
    "sort_by_length(words: List[str]) -> List[str]": "Sort the words by length, then alphabetically.",
    "longest_run(items: list) -> int": "Return the length of the longest run of equal neighbours.",
    "chunks(items: list, size: int) -> List[list]": "Split the list into pieces of the given size.",
    "first_repeated(items: list) -> int": "Return the position of the first item seen before, or -1.",
    "gcd_of_all(numbers: List[int]) -> int": "Return the greatest common divisor of all numbers.",
    "pairs_with_sum(numbers: List[int], total: int) -> list": "Return all pairs of numbers that add up to total.",
    "primes_below(n: int) -> List[int]": "Return all prime numbers smaller than n.",
    "to_binary(n: int) -> str": "Return the binary digits of n without a prefix.",
    "flatten(items: list) -> list": "Return the items of a list and of all lists inside it, in order.",
}


def template_prompts(domain: str, count: int) -> list[str]:
    """`count` different prompts of a domain in TEMPLATES, the same ones at every call."""
    draw = random.Random(domain)
    prompts: dict[str, None] = {}  # in order
    for number in range(20 * count):
        template = TEMPLATES[domain][number % len(TEMPLATES[domain])]
        values = {slot: draw.choice(choices) for slot, choices in SLOTS.items()}
        values["function"], values["does"] = draw.choice(list(FUNCTIONS.items()))
        values["other_topic"] = draw.choice([topic for topic in SLOTS["topic"] if topic != values["topic"]])
        prompts.setdefault(template.format(**values))
        if len(prompts) == count:
            break
    return list(prompts)
