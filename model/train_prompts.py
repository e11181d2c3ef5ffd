"""Prompts where no collection has them: from templates, and in the target's own words. The target answers them."""

import json
import random
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from model.errors import UserError
from model.files import write_atomically
from model.tokenizer import Tokenizer
from model.train_data import continue_batch, read_lines
from model.transformer import Target

OWN_TOKENS, OWN_TOP_K, OWN_BATCH = 96, 50, 192  # of prompts in the target's own words: length, sampling, at a time

# {topic} and the like are drawn from SLOTS and FUNCTIONS; other braces are LaTeX and stay.
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
        "Imagine that you are {person} and write to {character} about {matter}.",
        "Suppose you are a teacher. How would you explain the link between {topic} and {other_topic} to {reader}?",
        "What are the causes of {topic}, and what follows from it? Answer with examples.",
        "Describe how {topic} has changed in the last hundred years.",
        "What is the difference between {topic} and {other_topic}? Answer in a table.",
        "Draft an announcement for {event} in a {tone} tone.",
        "Write a review of {event} for a local newspaper.",
        "Create a list of questions for an interview with {character} about {topic}.",
        "Write the opening paragraph of a novel in which {character} finds {thing} during {event}.",
        "Here is a note: \"{sentence} {second_sentence}\" Summarize it in a few words.",
        "Return a JSON object with the people, places and dates in this text: \"{sentence} {second_sentence}\"",
        "Sort these into natural and man-made things, and explain: {thing}, {other_thing}, a river, a bridge.",
        "Which word does not belong with the others: lighthouse, violin, {fruit}, telescope? Why?",
        "{character} is older than {person}, and {person} is older than the mayor. Who is the youngest? Explain.",
        "A train leaves at {number} o'clock and needs {number} hours and a half. When does it arrive?",
        "How does {topic} work? Explain the main ideas, and name a question that is still open.",
        "Give a short biography of someone who is known for {topic}.",
        "Convince {person} to take part in {event}. Answer possible objections.",
        "What should I cook with {fruit} and rice? Give me a recipe.",
        "Name {number} ways in which {topic} affects {activity}.",
    ),
    "math": (
        "Solve for $x$: ${a}x + {b} = {c}$.{boxed}",
        "What is the remainder when ${big}$ is divided by ${a}$?{boxed}",
        "Compute $\\frac{{a}}{{b}} + \\frac{{c}}{{d}}$. Express your answer as a common fraction.{boxed}",
        "If $f(x) = {a}x^2 - {b}x + {c}$, what is $f({d})$?{boxed}",
        "Find the roots of $x^2 - {a}x - {b} = 0$.{boxed}",
        "A rectangle has sides of ${a}$ and ${b}$ units. What is the length of its diagonal?{boxed}",
        "In a right triangle $ABC$ with the right angle at $B$, $AB = {a}$ and $BC = {b}$. What is $\\tan A$?{boxed}",
        "How many integers $n$ satisfy $|n - {a}| \\le {b}$?{boxed}",
        "A bag holds ${a}$ red and ${b}$ blue marbles. What is the probability that two drawn ones are red?{boxed}",
        "How many ways are there to choose ${d}$ people from a group of ${c}$?{boxed}",
        "Find the distance between the points $({a}, {b})$ and $({c}, {d})$.{boxed}",
        "Simplify $\\sqrt{{big}}$.{boxed}",
        "What is the least common multiple of ${a}$, ${b}$ and ${c}$?{boxed}",
        "The sum of three consecutive integers is ${big}$. What is the largest of them?{boxed}",
        "Let $\\mathbf{v} = \\begin{pmatrix} {a} \\\\ {b} \\end{pmatrix}$ and"
        " $\\mathbf{w} = \\begin{pmatrix} {c} \\\\ {d} \\end{pmatrix}$. Find $\\mathbf{v} \\cdot \\mathbf{w}$.{boxed}",
        "Evaluate $\\log_{d} {big}$ to the nearest integer.{boxed}",
        "Expand $(x + {a})(x - {b})$.{boxed}",
        "What is the sum of the first ${big}$ positive integers that are multiples of ${a}$?{boxed}",
        "A circle has the equation $x^2 + y^2 - {a}x + {b}y = {c}$. What is its radius?{boxed}",
        "If ${a}$ workers need ${b}$ days for a job, how many days do ${c}$ workers need?{boxed}",
        "What is ${a}\\%$ of ${big}$?{boxed}",
        "Convert the number ${big}$ to base ${d}$.{boxed}",
        "What is the degree measure of an interior angle of a regular polygon with ${c}$ sides?{boxed}",
        "Define $a_1 = {a}$ and $a_{n+1} = {d}a_n + {b}$. What is $a_4$?{boxed}",
        "If $x + y = {c}$ and $xy = {a}$, what is $x^2 + y^2$?{boxed}",
        "How many positive divisors does ${big}$ have?{boxed}",
        "For what value of $k$ does the line $y = {a}x + k$ pass through the point $({b}, {c})$?{boxed}",
        "The price of a ticket rises from ${a}$ to ${c}$ dollars. By what percentage does it rise?{boxed}",
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
        'def {function}:\n    """ {does}\n    >>> {example}\n    """\n',
        'from typing import List\n\n\ndef {function}:\n    """{does}\n    >>> {example}\n    """\n',
        'def {function}:\n    """\n    {does}\n\n    Examples:\n    {example}\n    """\n',
        "Write a python function for this task. {does}",
        "What does `{call}` return, and why? The function is described thus: {does}",
        "Write an HTML page with a button that {effect}.",
        "What is the time complexity of {structure}? Show an implementation in {programming}.",
    ),
}
SLOTS = {
    "topic": (
        "photosynthesis", "inflation", "machine learning", "the French Revolution", "plate tectonics", "gravity",
        "the immune system", "supply and demand", "democracy", "renewable energy", "the water cycle", "jazz music",
        "the Renaissance", "evolution", "public transport", "remote work", "the stock market", "sleep", "antibiotics",
        "the theory of relativity", "artificial intelligence", "climate change", "probability", "social media",
        "volcanoes", "the Roman Empire", "quantum mechanics", "DNA", "taxes", "the solar system", "chess",
        "ocean currents",
        "black holes", "advertising", "human rights", "electric cars", "the printing press", "vaccines", "databases",
        "the Industrial Revolution", "meditation", "globalization", "encryption", "genetic engineering", "Shakespeare",
        "the human heart", "magnetism", "insurance", "impressionist painting", "economic growth", "space travel",
        "neural networks", "unemployment", "monopolies", "game theory", "central banks", "earthquakes", "glaciers",
        "nuclear power", "acids and bases", "the periodic table", "batteries", "lasers", "radio waves", "bacteria",
        "memory", "habits", "friendship", "leadership", "procrastination", "stress", "healthy eating", "vitamins",
        "the Cold War", "the Silk Road", "ancient Egypt", "the Vikings", "colonialism", "the Olympic Games", "opera",
        "classical music", "photography", "architecture", "film editing", "poetry", "mythology", "stoicism", "ethics",
        "free speech", "privacy", "copyright", "tourism", "urban planning", "recycling", "biodiversity", "bees",
        "coral reefs", "whales", "rainforests", "deserts", "weather forecasts", "airplanes", "bridges", "robots",
        "smartphones", "the internet", "video games", "open source software", "version control", "sorting algorithms",
        "recursion", "statistics", "prime numbers", "calculus", "logarithms", "entropy", "black swan events",
    ),
    "reader": (
        "a ten-year-old", "a beginner", "a busy manager", "a visitor from another planet", "a student", "a grandparent",
        "an engineer", "a sceptical neighbour",
    ),
    "number": ("3", "4", "5", "6", "7", "8", "10"),
    "activity": (
        "learning a new language", "moving to another city", "cooking for a large family", "preparing a job interview",
        "saving money", "running a marathon", "writing a novel", "growing tomatoes", "giving a speech",
        "planning a trip to Japan", "adopting a dog", "studying for an exam", "starting a small business",
        "organizing a wedding", "learning the guitar", "repairing a bicycle", "camping in the mountains",
        "buying a used car", "managing a team", "painting a room", "hosting a dinner", "reading more books",
        "building a website", "sleeping better", "visiting Rome", "raising chickens", "learning to swim",
        "keeping a diary", "teaching mathematics", "negotiating a salary",
    ),
    "character": (
        "a retired sailor", "a young inventor", "a curious robot", "an old librarian", "a medieval knight",
        "a detective", "a chef", "a space explorer", "a talking cat", "a history teacher", "a doctor", "a pirate queen",
        "a lonely giant", "a street musician", "a museum guard", "a famous physicist", "a time traveller", "a gardener",
        "a lighthouse keeper", "a football coach", "an economist", "a nervous dragon", "a travel guide",
        "a philosopher",
    ),
    "thing": (
        "a hidden garden", "an old lighthouse", "a bicycle", "a mysterious letter", "a thunderstorm", "a silver key",
        "a telescope", "a forgotten village", "a violin", "the first snow", "a paper boat", "a coffee machine",
        "a broken clock", "a red umbrella", "a secret staircase", "a wooden chest", "a map without names",
        "a small drone",
        "an empty theatre", "a golden feather", "a night train", "a market in the rain", "a pair of headphones",
    ),
    "person": (
        "a colleague", "my landlord", "a customer", "my professor", "the city council", "a friend", "my manager",
        "a new neighbour", "a journalist", "my sister", "the head of a school",
    ),
    "matter": (
        "a delayed delivery", "next week's meeting", "a broken heater", "an invitation to dinner", "a new idea",
        "a job application", "thanking them for their help", "a change of plans", "a missing invoice",
        "feedback on a report",
        "a request for time off", "a noisy party", "a book recommendation", "a lost suitcase", "a charity run",
    ),
    "event": (
        "a village festival", "the opening of a restaurant", "a science fair", "a concert in the park", "a charity run",
        "a school play", "a film night", "a chess tournament", "a cooking class", "an art exhibition",
        "a beach cleanup",
    ),
    "fruit": ("apples", "mushrooms", "tomatoes", "chickpeas", "spinach", "lemons", "carrots", "eggs", "pumpkin"),
    "tone": ("formal", "friendly", "funny", "persuasive", "simple", "dramatic", "polite"),
    "sentence": (
        "The meeting has been moved to Friday because of the storm.", "She don't know where the keys is.",
        "We are sorry that your order arrived late.", "The old bridge was closed after the flood last year.",
        "He gave up his job to travel around the world.", "Our team finished the project two weeks early.",
        "I seen the movie yesterday and it were great.", "The children played in the park until it was dark.",
        "Maria Lopez moved from Madrid to Toronto in 2011.", "The battery lasts long but the screen is too dark.",
        "In 1969 the first people walked on the moon.", "The company sold 12,000 bicycles in the spring.",
        "Nobody knew why the lights went out at midnight.", "My brother and me was waiting for the bus.",
        "Dr. Chen opened a clinic in Nairobi last May.", "The food was cold and the waiter forgot our drinks.",
        "Water boils at a lower temperature in the mountains.", "Their new album is better than the last one.",
    ),
    "language": ("French", "Spanish", "German", "Italian", "Portuguese"),
    "programming": ("Python", "JavaScript", "C++", "Java", "SQL"),
    "structure": (
        "a stack", "a queue", "a linked list", "a binary tree", "a hash map", "a bank account", "a matrix",
        "a priority queue",
        "binary search", "merge sort", "a graph search", "a shopping cart", "a text parser", "a cache",
        "a word counter",
        "the Fibonacci sequence", "a tic-tac-toe board",
    ),
    "effect": (
        "changes the background colour", "counts how often it was clicked", "shows the current time",
        "adds a line to a list",
        "hides a picture", "greets the visitor by name", "rolls two dice",
    ),
    "boxed": ("", "\nPlease reason step by step, and put your final answer within \\boxed{}.", " Explain each step."),
    "a": ("2", "3", "4", "5", "6", "7", "9", "12"),
    "b": ("1", "2", "3", "5", "8", "11", "15"),
    "c": ("7", "10", "12", "13", "16", "20", "24"),
    "d": ("2", "3", "4", "5", "6"),
    "big": ("36", "48", "60", "75", "96", "120", "144", "210", "343", "512", "1001"),
}  # fmt: skip
# A signature: what the function does, and a call of it with its result.
FUNCTIONS = {
    "count_vowels(text: str) -> int": (
        "Return how many vowels the text has.",
        "count_vowels('banana')",
        "3",
    ),
    "largest_gap(numbers: List[int]) -> int": (
        "Return the largest difference between two neighbours.",
        "largest_gap([1, 4, 9])",
        "5",
    ),
    "is_sorted(items: list) -> bool": (
        "Check whether no item is smaller than the one before it.",
        "is_sorted([1, 2, 2])",
        "True",
    ),
    "merge_counts(a: dict, b: dict) -> dict": (
        "Add up the counts of two dictionaries, key by key.",
        "merge_counts({'a': 1}, {'a': 2})",
        "{'a': 3}",
    ),
    "running_mean(numbers: List[float]) -> List[float]": (
        "Return the mean of the first 1, 2, 3 and more numbers.",
        "running_mean([2.0, 4.0])",
        "[2.0, 3.0]",
    ),
    "unique_words(text: str) -> List[str]": (
        "Return the different words of a text in alphabetical order.",
        "unique_words('one two one')",
        "['one', 'two']",
    ),
    "digit_sum(n: int) -> int": (
        "Return the sum of the decimal digits of n.",
        "digit_sum(405)",
        "9",
    ),
    "rotate_left(items: list, k: int) -> list": (
        "Move the first k items to the end of the list.",
        "rotate_left([1, 2, 3], 1)",
        "[2, 3, 1]",
    ),
    "longest_word(text: str) -> str": (
        "Return the longest word of a text; of several the first one.",
        "longest_word('a long road')",
        "'long'",
    ),
    "second_largest(numbers: List[int]) -> int": (
        "Return the second largest of the different numbers.",
        "second_largest([3, 9, 9, 5])",
        "5",
    ),
    "caesar(text: str, k: int) -> str": (
        "Shift every letter of the text by k places in the alphabet.",
        "caesar('abc', 2)",
        "'cde'",
    ),
    "transpose(matrix: List[List[int]]) -> List[List[int]]": (
        "Exchange the rows and columns of a matrix.",
        "transpose([[1, 2], [3, 4]])",
        "[[1, 3], [2, 4]]",
    ),
    "is_leap_year(year: int) -> bool": (
        "Check whether a year has 366 days.",
        "is_leap_year(2000)",
        "True",
    ),
    "remove_duplicates(items: list) -> list": (
        "Keep the first of equal items and drop the others.",
        "remove_duplicates([1, 2, 1])",
        "[1, 2]",
    ),
    "sum_of_evens(numbers: List[int]) -> int": (
        "Return the sum of all even numbers in the list.",
        "sum_of_evens([1, 2, 4])",
        "6",
    ),
    "is_palindrome(text: str) -> bool": (
        "Check whether the text reads the same backwards.",
        "is_palindrome('level')",
        "True",
    ),
    "most_frequent(items: list)": (
        "Return the item that occurs most often; of several the first one.",
        "most_frequent([2, 3, 3])",
        "3",
    ),
    "sort_by_length(words: List[str]) -> List[str]": (
        "Sort the words by length, then alphabetically.",
        "sort_by_length(['ccc', 'b', 'aa'])",
        "['b', 'aa', 'ccc']",
    ),
    "longest_run(items: list) -> int": (
        "Return the length of the longest run of equal neighbours.",
        "longest_run([1, 1, 2])",
        "2",
    ),
    "chunks(items: list, size: int) -> List[list]": (
        "Split the list into pieces of the given size.",
        "chunks([1, 2, 3], 2)",
        "[[1, 2], [3]]",
    ),
    "first_repeated(items: list) -> int": (
        "Return the position of the first item seen before, or -1.",
        "first_repeated([4, 5, 4])",
        "2",
    ),
    "gcd_of_all(numbers: List[int]) -> int": (
        "Return the greatest common divisor of all numbers.",
        "gcd_of_all([12, 18])",
        "6",
    ),
    "pairs_with_sum(numbers: List[int], total: int) -> list": (
        "Return all pairs of numbers that add up to total.",
        "pairs_with_sum([1, 2, 3], 4)",
        "[(1, 3)]",
    ),
    "primes_below(n: int) -> List[int]": (
        "Return all prime numbers smaller than n.",
        "primes_below(10)",
        "[2, 3, 5, 7]",
    ),
    "to_binary(n: int) -> str": (
        "Return the binary digits of n without a prefix.",
        "to_binary(5)",
        "'101'",
    ),
    "flatten(items: list) -> list": (
        "Return the items of a list and of all lists inside it, in order.",
        "flatten([1, [2, [3]]])",
        "[1, 2, 3]",
    ),
    "swap_case(text: str) -> str": (
        "Turn small letters into capitals and capitals into small letters.",
        "swap_case('Ab')",
        "'aB'",
    ),
    "closest_to_zero(numbers: List[int]) -> int": (
        "Return the number closest to zero; of two the positive one.",
        "closest_to_zero([-3, 2, 5])",
        "2",
    ),
    "is_prime(n: int) -> bool": (
        "Check whether n has no divisors but 1 and itself.",
        "is_prime(13)",
        "True",
    ),
    "factorial(n: int) -> int": (
        "Return the product of the numbers from 1 to n.",
        "factorial(4)",
        "24",
    ),
    "intersect(a: list, b: list) -> list": (
        "Return the sorted items that are in both lists, each once.",
        "intersect([1, 2, 2], [2, 3])",
        "[2]",
    ),
    "word_lengths(text: str) -> dict": (
        "Map every word of the text to its length.",
        "word_lengths('to be')",
        "{'to': 2, 'be': 2}",
    ),
    "is_anagram(a: str, b: str) -> bool": (
        "Check whether two words have the same letters.",
        "is_anagram('listen', 'silent')",
        "True",
    ),
    "collatz(n: int) -> List[int]": (
        "Return the Collatz sequence that starts at n and ends at 1.",
        "collatz(3)",
        "[3, 10, 5, 16, 8, 4, 2, 1]",
    ),
    "balanced(text: str) -> bool": (
        "Check whether every opening bracket of the text is closed in the right order.",
        "balanced('([])')",
        "True",
    ),
    "decode_runs(text: str) -> str": (
        "Expand letters that are followed by how often they come.",
        "decode_runs('a3b1')",
        "'aaab'",
    ),
    "max_sum(numbers: List[int], k: int) -> int": (
        "Return the largest sum of k neighbours.",
        "max_sum([1, 5, 2, 4], 2)",
        "7",
    ),
    "median(numbers: List[float]) -> float": (
        "Return the middle number, or the mean of the two in the middle.",
        "median([3, 1, 2])",
        "2",
    ),
    "reverse_words(text: str) -> str": (
        "Return the words of the text in reverse order.",
        "reverse_words('a b c')",
        "'c b a'",
    ),
    "common_prefix(words: List[str]) -> str": (
        "Return the longest beginning that all words share.",
        "common_prefix(['flow', 'flat'])",
        "'fl'",
    ),
    "roman(n: int) -> str": (
        "Return the Roman numeral of a number below 4000.",
        "roman(14)",
        "'XIV'",
    ),
    "diagonal_sum(matrix: List[List[int]]) -> int": (
        "Return the sum of the numbers on the main diagonal.",
        "diagonal_sum([[1, 2], [3, 4]])",
        "5",
    ),
    "count_pairs(numbers: List[int]) -> int": (
        "Count the pairs of equal numbers.",
        "count_pairs([1, 1, 1])",
        "3",
    ),
    "title_case(text: str) -> str": (
        "Begin every word of the text with a capital.",
        "title_case('old town')",
        "'Old Town'",
    ),
}


def template_prompts(domain: str, count: int) -> list[str]:
    """`count` different prompts of a domain in TEMPLATES, or as many as it has; the same ones at every call."""
    draw = random.Random(domain)
    prompts: dict[str, None] = {}  # in order
    for number in range(20 * count):
        template = TEMPLATES[domain][number % len(TEMPLATES[domain])]
        prompts.setdefault(fill(template, draw))
        if len(prompts) == count:
            break
    return list(prompts)


def fill(template: str, draw: random.Random) -> str:
    """The template with a drawn value in each slot."""
    values = {slot: draw.choice(choices) for slot, choices in SLOTS.items()}
    for slot, first in ("other_topic", "topic"), ("other_thing", "thing"), ("second_sentence", "sentence"):
        values[slot] = draw.choice([choice for choice in SLOTS[first] if choice != values[first]])
    values["function"], (values["does"], values["call"], result) = draw.choice(list(FUNCTIONS.items()))
    values["example"] = f"{values['call']}\n    {result}"
    return re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], match[0]), template)


def own_prompts(
    target: Target, tokenizer: Tokenizer, count: int, file: str | Path, progress: Callable[[int, int], None] | None = None
) -> list[str]:
    """`count` different prompts in the words of the target, written to `file` as they come, a JSON string a line.

    A chat model has read users, so it can write as one: given the chat template up to where a user's words begin, it
    goes on with such words (Magpie, arXiv 2406.08464), at temperature 1 among the likeliest OWN_TOP_K tokens. Those
    that come to no end in OWN_TOKENS tokens are left out. Fewer where a batch brings nothing new, with a warning.
    """
    file, stop, opening = Path(file), set(tokenizer.stop_ids), before_user(tokenizer)
    texts = dict.fromkeys(read_lines(file)) if file.exists() else {}
    write_atomically(file, "".join(json.dumps(text) + "\n" for text in texts))  # less one that was cut
    generator = torch.Generator(target.device).manual_seed(len(texts))

    def choose(logits: Tensor) -> Tensor:
        top = logits.float().topk(min(OWN_TOP_K, logits.shape[-1]))
        drawn = top.values.softmax(-1).multinomial(1, generator=generator)
        return top.indices.gather(-1, drawn)[:, 0]

    while len(texts) < count:
        rows = continue_batch(target, [opening] * OWN_BATCH, stop, OWN_TOKENS, choose)
        ended = [tokenizer.decode(row[:-1]).strip() for row in rows if row[-1] in stop]
        fresh = [text for text in dict.fromkeys(ended) if text and text not in texts]
        if not fresh:
            warnings.warn(f"{len(texts)} of {count} prompts in the target's own words: it writes no more that end")
            break
        with open(file, "a", encoding="utf-8") as out:
            out.writelines(json.dumps(text) + "\n" for text in fresh)
        texts |= dict.fromkeys(fresh)
        if progress:
            progress(min(len(texts), count), count)
    return list(texts)[:count]


def before_user(tokenizer: Tokenizer) -> list[int]:
    """Token ids of the chat template up to where the user's words begin."""
    words = "THE-WORDS-OF-THE-USER"
    opening, found, _ = tokenizer.render_chat(words).partition(words)
    ids = tokenizer.encode_rendered(opening)
    if not found or not ids:
        raise UserError("--own-prompts: the chat template of this target has nothing before the user's words")
    return ids
