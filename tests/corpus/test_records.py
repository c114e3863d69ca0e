from dflash.corpus.records import Ledger, conservation_table


def test_a_source_whose_name_holds_a_bar_takes_one_cell_of_the_table():
    ledger = Ledger()
    ledger.count("a|b.jsonl", 3)
    ledger.keep("a|b.jsonl", 2)
    ledger.drop("a|b.jsonl", "empty")
    assert conservation_table(ledger.summary()).splitlines()[2:] == [
        r"| a\|b.jsonl | 3 | 2 | 1 |",
        "| all | 3 | 2 | 1 |",
    ]
