"""Build the embedded text set from the noun definitions of WordNet 3.0, Debian package `wordnet-base`.

    apt-get install wordnet-base && python data/build_wordnet.py

A document is the definition of one sense of a noun, without its quoted examples; its label is the topic of the
lexicographer file that the sense comes from (numbers: `man 5WN lexnames`). Order, choice and split follow the
SHA-256 of the definition, so that they need no random numbers and come out the same everywhere.
"""

import argparse
import csv
import hashlib
import io
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from building import HERE, write_card, write_checksums, write_gzip

SOURCE = Path("/usr/share/wordnet/data.noun")
TOPICS = {
    4: "act", 5: "animal", 6: "artifact", 8: "body", 9: "cognition", 10: "communication",
    13: "food", 15: "location", 18: "person", 20: "plant", 26: "state", 27: "substance",
}  # fmt: skip
MOST, FEWEST_WORDS, TEST_SHARE = 2500, 4, 0.2

# Senses that WordNet itself marks by usage: ethnic_slur, obscenity, disparagement (offsets in data.noun).
MARKED = {"06718862", "07124340", "06717170"}
# Definitions, or their examples, that say so of the word they define, or that speak of such words.
OFFENSIVE = re.compile(
    r"(?<!in)offensive|disparag|derogat|obscen|\bslurs?\b|\bvulgar(ly|ian|iser|izer)?\b|pejorat|\binsult|\babus"
    r"|\bdefam|contempt(?!orar)|profan|\blewd|\btaboo",
    re.IGNORECASE,
)
# Subjects that a teacher would rather not find on the classroom's screen by chance: sexuality, excretion, violence
# against persons, self-harm; and how WordNet's authors, decades ago, wrote of peoples, of disability and of women.
CLASSROOM = re.compile(
    r"\b(sex(es|ual\w*|ploit\w*|y)?|bisexual\w*|heterosexual\w*|homosexual\w*|lesbian\w*|gay|transsexual\w*"
    r"|transvest\w*|hermaphrodit\w*|genital\w*|penis\w*|penile|phall\w*|vagina\w*|vulva\w*|clitor\w*|labi[aou]\w*"
    r"|scrot\w*|testic\w*|testes|testis|foreskin|circumcis\w*|anus|anal|rectum|buttocks?|breasts?|nipples?|pubic"
    r"|pubis|crotch|semen|sperm|spermato\w+|ejacul\w*|erection|impotence|orgasm\w*|masturb\w*|copulat\w*|coitus"
    r"|coital|intercourse|fornicat\w*|adulter(y|er|ess|ous)|erotic\w*|aphrodisi\w*|porn\w*|striptease\w*"
    r"|nud(e|es|ity|ist|ists|ism)|naked(ness)?|prostitut\w*|brothel\w*|whor\w*|pimps?|harlot\w*|strumpet\w*"
    r"|slut\w*|concubin\w*|mistress\w*|harem|promiscu\w*|licentious\w*|lech\w*|lust\w*|lasciv\w*|seduc\w*"
    r"|rape[sd]?|raping|rapists?|incest\w*|p(a)?edophil\w*|pederast\w*|sodom\w*|bestiality|sad(ist|ism|istic)\w*"
    r"|masochis\w*|fetish\w*|molest\w*|condoms?|contracepti\w*|menstru\w*|venereal|gonorrh\w*|syphili\w*"
    r"|chlamydia\w*|abortion\w*|feces|faeces|fecal|excrement|excret\w*|urin\w*|defecat\w*|diarrh\w*|flatu\w*"
    r"|enemas?|vomit\w*|dung|suicid\w*|hara-?kiri|murder\w*|assassin\w*|tortur\w*|mutilat\w*|castrat\w*|behead\w*"
    r"|decapitat\w*|disembowel\w*|cannibal\w*|genocid\w*|massacr\w*|lynch\w*|execution(er|ers)?|strangl\w*"
    r"|terroris\w*|infanticid\w*|Nazi\w*|Hitler|Holocaust|gas chambers?|pogroms?|Klan|racis[tm]\w*|bigot\w*"
    r"|segregation\w*|heroin|cocaine|crack cocaine|marijuana|cannabis|hashish|narcotic\w*|opium|addict\w*|Negr\w*"
    r"|Caucasoids?|Mongoloids?|mulatto\w*|mestizo\w*|half-?breeds?|half-?castes?|savages?|primitive people\w*"
    r"|uncivili\w*|Gyps(y|ies)|Eskimos?|Orientals?|Hottentots?|Bushm[ae]n|Pygm\w+|races?|racial\w*|dark-skinned"
    r"|light-skinned|white supremac\w*|slaves?|slavery|enslav\w*|blacks|infidels?|heathens?|pagans?|heretic\w*"
    r"|retard\w*|idiot\w*|imbecil\w*|moron\w*|dimwit\w*|simpleton\w*|feeble-?minded\w*|mental(ly)? defect\w*"
    r"|lunatic\w*|insan(e|ity)|demented|maniac\w*|crippl\w*|midgets?|dwarfs?|deform(ed|ity|ities)|freaks?"
    r"|imbecility|stupid\w*|ugly|slovenly|dirty|filthy|disreputable|despicable|worthless|scoundrel\w*|villain\w*"
    r"|effeminate|unmanly|mannish|(normal|limited|subnormal) intelligence|not very intelligent|empty-headed"
    r"|fellati\w*|cunniling\w*|orgy|orgi(es|astic)|attractive bust|necrophil\w*|intimacy|black and a white|caste"
    r"|hanged|tall dark|Palestinians?|Israelis?|underprivileged"
    r"|(aggressive|domineering|nagging|frenzied|distraught|unpleasant) wom[ae]n|advantage of women|kill(ing|ers?)"
    r"|poisoning some|eating the flesh|atroci\w*|persecut\w*|squaws?|love affair|illegitimate|bastards?"
    r"|old wom[ae]n|loose|immoral|spinster\w*|shrew(ish)?|scold(ing)?|attractive (young )?(wom[ae]n|girls?)"
    r"|young wom[ae]n|prett(y|ier) (girl|wom[ae]n)\w*|fat (person|wom[ae]n|man|people)|obese)\b"
    r"|\bBlack (Americans?|African\w*|people|persons?|m[ae]n|wom[ae]n|child\w*)",
    re.IGNORECASE,
)

CARD = """# WordNet topics: {total:,} noun definitions in 12 topics

Short English documents, each the definition of one sense of a noun. The task: which of 12 topics is it from?

| | |
|---|---|
| source | WordNet 3.0, Princeton University: Fellbaum (1998, ed.), "WordNet: An Electronic Lexical Database", MIT Press, <https://wordnet.princeton.edu>; taken from the Debian package `wordnet-base` |
| licence | WordNet 3.0 licence, copyright 2006 Princeton University: see `LICENSE`, which has to go with every copy |
| label | the lexicographer file of the sense (noun.act, noun.animal, ...), WordNet's own division |
| document | the definition, without the word defined and without the quoted examples |
| documents | {total:,}: {train:,} train, {test:,} test |
| length | {words:.1f} words on average, {fewest} to {most} |
| files | `train.csv.gz`, `test.csv.gz`: topic, definition; no header; UTF-8 (ASCII in fact). `classes.txt`: the topics in label order. {size:.2f} MB (10^6 bytes) gzipped |
| built by | `data/build_wordnet.py` |

## Documents

| topic | in WordNet | dropped: short or quoted | dropped: marked offensive | dropped: not for the classroom | dropped: duplicates | left | train | test |
|---|---:|---:|---:|---:|---:|---:|---:|---:|
{table}

## How it was cut

1. The definition is what stands before the first quoted example. Fewer than {fewest_words} words: dropped; so are the few in
   which a quotation is part of the sentence.
2. Dropped as offensive: senses that WordNet marks as ethnic slur, obscenity or disparagement, and glosses that call
   a word offensive, disparaging, obscene, vulgar and the like.
3. Dropped for the classroom: definitions with a word from a fixed list in the script (sexuality, excretion, violence
   against persons, self-harm, drugs, and dated ways to write of peoples, disability and women).
4. Exact duplicates (case ignored) within a topic are kept once; a definition that stands in two topics is dropped from both.
5. In the order of the SHA-256 of the definition: at most {most_per_topic:,} a topic, of these the first {share:.0%} for test.

## Caveats

- The filters work on words, so they drop harmless definitions and can miss unpleasant ones.
- Definitions date from 2006 and before: persons, states and borders are described as of then, from an American view.
- The topics overlap (a *plant* that is a *food*; an *act* of *communication*); labels are one lexicographer's choice.
- Definitions of one family resemble each other and stand on both sides of the split; accuracy measures topic
  recognition on this dictionary, not on text at large.
- Animals and plants are often told by their formulas ("genus of", "any of various").
"""  # noqa: E501 (rows of a Markdown table)


class Sense(NamedTuple):
    """One sense of a noun: its topic, its definition and whole gloss, and the usages WordNet marks it with."""

    topic: str
    definition: str
    gloss: str
    usages: frozenset[str]


def parse(line: str) -> Sense | None:
    """A line of data.noun (format: `man 5WN wndb`), or None where its topic is not one of ours."""
    head, _, gloss = line.partition(" | ")
    fields = head.split()
    topic = TOPICS.get(int(fields[1]))
    if topic is None:
        return None
    pointers = fields[5 + 2 * int(fields[3], 16) :]  # after the words, which are counted in hexadecimal
    usages = frozenset(target for kind, target in zip(pointers[0::4], pointers[1::4], strict=False) if kind == ";u")
    definition = re.split(r'[;:,]\s*"', gloss)[0].strip().rstrip(";:,")
    return Sense(topic, definition, gloss, usages)


def why_dropped(sense: Sense) -> str | None:
    """Why a sense is not taken, or None."""
    if len(sense.definition.split()) < FEWEST_WORDS or '"' in sense.definition:
        return "short or quoted"
    if sense.usages & MARKED or OFFENSIVE.search(sense.gloss):
        return "offensive"
    if CLASSROOM.search(sense.definition):
        return "classroom"
    return None


def rank(definition: str) -> str:
    """Where a definition stands in the one order that choice, split and files follow."""
    return hashlib.sha256(definition.encode()).hexdigest()


def build(lines: Iterable[str]) -> tuple[dict[str, list[tuple[str, str]]], dict[str, Counter[str]]]:
    """The rows (topic, definition) of each split, and for each topic how many were read, dropped and kept."""
    counts = {topic: Counter[str]() for topic in TOPICS.values()}
    topics_of: dict[str, set[str]] = {}
    spelling: dict[str, str] = {}
    for sense in (parse(line) for line in lines if not line.startswith(" ")):
        if sense is None:
            continue
        counts[sense.topic]["read"] += 1
        reason = why_dropped(sense)
        key = sense.definition.lower()
        if reason is None and sense.topic in topics_of.get(key, ()):
            reason = "duplicate"
        if reason is not None:
            counts[sense.topic][reason] += 1
            continue
        topics_of.setdefault(key, set()).add(sense.topic)
        spelling.setdefault(key, sense.definition)
    by_topic: dict[str, list[str]] = {topic: [] for topic in TOPICS.values()}
    for key, topics in topics_of.items():
        for topic in topics:
            if len(topics) > 1:
                counts[topic]["duplicate"] += 1
            else:
                by_topic[topic].append(spelling[key])
    splits: dict[str, list[tuple[str, str]]] = {"train": [], "test": []}
    for topic, definitions in by_topic.items():
        counts[topic]["left"] = len(definitions)
        chosen = sorted(definitions, key=rank)[:MOST]
        first_train = round(len(chosen) * TEST_SHARE)
        for split, part in (("test", chosen[:first_train]), ("train", chosen[first_train:])):
            counts[topic][split] = len(part)
            splits[split] += [(topic, definition) for definition in part]
    # The topics are mixed by the same hash, reversed, or the order within a file would follow the split.
    return {name: sorted(rows, key=lambda row: rank(row[1])[::-1]) for name, rows in splits.items()}, counts


def as_csv(rows: Iterable[tuple[str, str]]) -> bytes:
    """Rows as CSV with line feeds, so that the bytes don't depend on the platform."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def licence(lines: Iterable[str]) -> str:
    """The licence as it stands, with line numbers, at the head of WordNet's own file."""
    return "".join(re.sub(r"^ +[0-9]+ ", "", line).rstrip() + "\n" for line in lines if line.startswith(" "))


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    if not SOURCE.is_file():
        raise SystemExit(f"{SOURCE} is missing: install the Debian package wordnet-base.")
    lines = SOURCE.read_text(encoding="utf-8").splitlines()
    splits, counts = build(lines)
    target = HERE / "wordnet-topics"
    for name, rows in splits.items():
        write_gzip(target / f"{name}.csv.gz", as_csv(rows))
    columns = ("read", "short or quoted", "offensive", "classroom", "duplicate", "left", "train", "test")
    table = [[topic, *(counts[topic][column] for column in columns)] for topic in TOPICS.values()]
    table.append(["**all**", *(sum(counts[topic][column] for topic in counts) for column in columns)])
    lengths = [len(definition.split()) for rows in splits.values() for _, definition in rows]
    card = CARD.format(
        total=len(lengths),
        train=len(splits["train"]),
        test=len(splits["test"]),
        words=sum(lengths) / len(lengths),
        fewest=min(lengths),
        most=max(lengths),
        fewest_words=FEWEST_WORDS,
        most_per_topic=MOST,
        share=TEST_SHARE,
        size=sum(path.stat().st_size for path in target.glob("*.gz")) / 1e6,
        table="\n".join("| " + " | ".join(str(cell) for cell in row) + " |" for row in table),
    )
    write_card(target / "CARD.md", card)
    (target / "LICENSE").write_text(licence(lines), encoding="utf-8")
    (target / "classes.txt").write_text("\n".join(TOPICS.values()) + "\n", encoding="utf-8")
    write_checksums()
    print(card)


if __name__ == "__main__":
    main()
