"""Files in, tables out: every format, how values are spelt, and one line for whatever is wrong."""

from __future__ import annotations

import gzip
import importlib
import os
import sys
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapcal.tables import columns_of, delimited, read, stream
from dapcal.tables.told import note_of
from dapcal.tables.values import MISSING, numbers, texts
from dapcal.types import DapcalWarning

KINDS = {"area": "number", "colour": "category"}


@pytest.fixture
def write(tmp_path):
    """Write bytes or text to a file of a name, and give its path."""

    def written(content: bytes | str, name: str = "house.csv"):
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return written


def one_line(error: pytest.ExceptionInfo) -> bool:
    return "\n" not in str(error.value) and str(error.value) != ""


def whole(path, expected=None, rows=8192):
    return pa.concat_tables(stream(path, expected, rows)).to_pydict()


@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.csv.gz", "t.parquet", "t.pq", "t.npz", "T.CSV"])
def test_every_format_gives_the_same_table(tmp_path, name):
    columns = {"area": [1.5, -2.0, 3e5], "colour": ["red", "blue", "red"]}
    table, path = pa.table(columns), tmp_path / name
    if name.endswith("npz"):
        np.savez(path, **{key: np.array(value) for key, value in columns.items()})
    elif name.lower().endswith(("csv", "tsv")):
        pa.csv.write_csv(table, path, pa.csv.WriteOptions(delimiter="\t" if name.endswith("tsv") else ","))
    elif name.endswith("gz"):
        path.write_bytes(gzip.compress(b"area,colour\n1.5,red\n-2,blue\n3e5,red\n"))
    else:
        pa.parquet.write_table(table, path)
    assert read(path).to_pydict() == columns
    assert whole(path, KINDS, rows=2) == columns
    assert columns_of(path) == ("area", "colour")


@pytest.mark.parametrize(
    "content",
    [
        "\ufeffarea,colour\r\n1,red\r\n2,\r\n",
        "area,colour\n1,red\n2,NA",
        "\n\narea,colour\n\n1,red\n\n2,\n\n",
        " area , colour\n 1 , red \n2, \n",
        "area;colour\n1;red\n2;\n",
        "area\tcolour\n1\tred\n2\t\n",
        "area|colour\n1|red\n2|\n",
        '"area","colour"\n"1","red"\n"2",""\n',
        "area,colour\r1,red\r2,\r",
    ],
    ids=["BOM and CRLF", "no last newline", "blank lines", "padded", "semicolons", "tabs", "bars", "quoted", "CR"],
)
def test_dialects(write, content):
    path = write(content)
    assert read(path).to_pydict() == {"area": [1.0, 2.0], "colour": ["red", None]}
    assert whole(path, KINDS) == {"area": [1.0, 2.0], "colour": ["red", None]}


def test_quoted_newlines_separators_and_unicode_names(write):
    path = write('größe,"a,\nb",名\n1,"x\ny, z",ß\n2,"say ""hi""",é\n')
    with pytest.warns(DapcalWarning, match="house.csv, row 1: column `a,\\nb` holds a line break"):
        table = read(path)
    assert table.to_pydict() == {"größe": [1.0, 2.0], "a,\nb": ["x\ny, z", 'say "hi"'], "名": ["ß", "é"]}


@pytest.mark.parametrize("spelling", MISSING)
def test_missing_values(write, spelling):
    path = write(f"area,colour\n1,red\n {spelling} ,{spelling}\n3,blue\n")
    assert read(path).to_pydict() == {"area": [1.0, None, 3.0], "colour": ["red", None, "blue"]}
    assert whole(path, KINDS, rows=1) == {"area": [1.0, None, 3.0], "colour": ["red", None, "blue"]}


def test_an_empty_line_of_a_single_column_is_a_missing_value(write):
    assert read(write("area\n1\n\n3\n")).to_pydict() == {"area": [1.0, None, 3.0]}
    assert read(write("path\na|b\n\nc;d\n")).to_pydict() == {"path": ["a|b", None, "c;d"]}


@pytest.mark.parametrize("value", ["1", "+1", "-1.5", ".5", "5.", "1e-3", "1E+05", "007", "12345678901234567890"])
def test_numbers_are_what_python_reads(write, value):
    path = write(f"area,b\n{value},x\n{value},y\n")
    assert read(path)["area"].to_pylist() == [float(value)] * 2
    assert whole(path, KINDS)["area"] == [float(value)] * 2


@settings(derandomize=True, max_examples=50, deadline=None)
@given(st.lists(st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False)), min_size=1, max_size=30))
def test_numbers_round_trip_through_text(values):
    column = pa.chunked_array([pa.array(["" if value is None else repr(value) for value in values])])
    expected = np.array([np.nan if value is None else value for value in values])
    np.testing.assert_array_equal(numbers(column, "x"), expected)


@settings(derandomize=True, max_examples=50, deadline=None)
@given(st.lists(st.integers(-(2**53) + 1, 2**53 - 1), min_size=1, max_size=20))
def test_whole_numbers_are_spelt_alike_whatever_their_type(values):
    expected = [str(value) for value in values]
    for kind in (pa.int64(), pa.float64(), pa.decimal128(20, 1)):
        column = pa.chunked_array([pa.array(values).cast(kind)])
        assert texts(column, "x").to_pylist() == expected
        assert (
            texts(column.dictionary_encode() if kind != pa.decimal128(20, 1) else column, "x").to_pylist() == expected
        )


def test_booleans_are_spelt_alike_whatever_the_file(write, tmp_path):
    pa.parquet.write_table(pa.table({"sold": [True, False, None]}), tmp_path / "t.parquet")
    expected = [["true", "false", None]]
    assert list(whole(tmp_path / "t.parquet", {"sold": "category"}).values()) == expected
    for text in ("sold\nTrue\nFALSE\n\n", "sold\nTRUE\nfalse\nNA\n"):
        assert list(whole(write(text), {"sold": "category"}).values()) == expected
        assert read(write(text)).to_pydict() == {"sold": expected[0]}


def test_the_first_rows_do_not_decide_what_a_column_holds(write):
    rows = "\n".join(["1,1"] * 3000 + ["2.5,red"])
    path = write(f"area,colour\n{rows}\n")
    batches = list(stream(path, KINDS, rows=1000))
    assert [len(batch) for batch in batches] == [1000, 1000, 1000, 1]
    assert {str(batch.schema) for batch in batches} == {str(batches[0].schema)}
    assert batches[-1].to_pydict() == {"area": [2.5], "colour": ["red"]}


def test_a_table_may_have_thousands_of_columns(write):
    names = [f"c{i}" for i in range(3000)]
    path = write("\n".join([",".join(names), ",".join(["1"] * 3000), ",".join(["x"] * 3000)]) + "\n")
    assert columns_of(path) == tuple(names)
    assert read(path).to_pydict() == {name: ["1", "x"] for name in names}


def test_columns_can_be_told_not_to_be_numbers(write):
    path = write("postcode,b\n01234,1\n99999,2\n")
    assert read(path, {"postcode": "category"}).to_pydict() == {"postcode": ["01234", "99999"], "b": [1.0, 2.0]}


def test_what_is_not_expected_stays_as_it_is(write):
    assert whole(write("area,note\n1, 7 \n"), {"area": "number", "absent": "number"}) == {
        "area": [1.0],
        "note": [" 7 "],
    }


@pytest.mark.parametrize("block", [64, 1000])
def test_batches_do_not_depend_on_blocks(write, monkeypatch, block):
    monkeypatch.setattr(delimited, "_BLOCK_BYTES", block)
    lines = [f'{i},"a\n{i}"' for i in range(200)]
    path = write("area,colour\n" + "\n".join(lines) + "\n")
    with pytest.warns(DapcalWarning, match="row 1: column `colour` holds a line break .*, the first of 200 such rows"):
        table = whole(path, KINDS, rows=7)
    assert table == {
        "area": [float(i) for i in range(200)],
        "colour": [f"a\n{i}" for i in range(200)],
    }


def test_a_matrix_in_an_npz_file_is_columns(tmp_path):
    x = np.arange(6, dtype=">f4").reshape(3, 2)
    np.savez_compressed(tmp_path / "t.npz", x=x, y=np.array([b"a", b"b", b"\xc3\xa9"]), z=np.array([1, 2, 3], np.int8))
    expected = {"x0": [0, 2, 4], "x1": [1, 3, 5], "y": ["a", "b", "é"], "z": [1, 2, 3]}
    assert read(tmp_path / "t.npz").to_pydict() == expected


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("", "is empty; expected a table with a header"),
        ("\n \n", "is empty; expected a table with a header"),
        ("area,colour\n", "has a header and no rows"),
        ("area,colour", "has a header and no rows"),
        ("area,colour\n1,red\n2,blue,3\n", r"csv, row 2: 3 values where the header names 2 columns \('2,blue,3'\)"),
        ("\n\narea,colour\n\n1,red\n2\n", "row 2: 1 values where the header names 2 columns"),
        ("area,area\n1,2\n", "two columns named `area`; rename one"),
        ("area, area\n1,2\n", "two columns named `area`; rename one"),
        (",area\n0,2\n", r"column 1 has no name; name it in the header, or write .* \(pandas: index=False\)"),
        ("1.5,2,3\n4,5,6\n", "has no header, its first line holds numbers alone"),
        (b"PAR1" + bytes(50), "is a Parquet file; name it .parquet"),
        (b"PK\x03\x04" + bytes(50), "is a zip archive; name it .xlsx if Excel wrote it"),
        (gzip.compress(b"a,b\n1,2\n", mtime=0), "compressed by gzip; name it .csv.gz"),
        ("a,b\n1,2\n".encode("utf-16"), "UTF-16; save it as UTF-8"),
        ("a,b\n1,2\n".encode("utf-16-le"), "holds binary data"),
        ("a,b\nä,2\n".encode("latin-1"), "is not UTF-8; save it as UTF-8 .*iconv"),
        ("ä,b\n1,2\n".encode("latin-1"), "is not UTF-8; save it as UTF-8 .*iconv"),
        (b"area,colour\n" + b"1,red\n" * 20_000 + b"2,r\0d\n", "row 20001: column `colour` holds a NUL byte"),
        ('a,b\n1,"2\n' + "3,4\n" * 100, "row 1: a quotation never ends, .*close its quotation mark"),
        ('a,"b\n1,2\n' + "3,4\n" * 50_000, "never closed"),
        ("area,colour\n1,red\ninf,red\n", "row 2: column `area` holds 'inf', which is not a finite number"),
        ("area,colour\n1,red\n1e999,red\n", "row 2: column `area` holds '1e999', which is not a finite number"),
        ("area;b\n1,5;2\n1.234,7;3\n", r"column `area` holds numbers with commas \('1,5'\); write them with a decimal"),
        ("area,b\n$1.50,2\n$2,3\n", r"column `area` holds numbers with signs or spaces \('\$1.50'\); write"),
        ("area,b\n12.5%,2\n7 %,3\n", r"column `area` holds numbers with signs or spaces \('12.5%'\)"),
        ("area;b\n12 500;2\n7\u00a0000,5;3\n", r"column `area` holds numbers with signs or spaces \('12 500'\)"),
        ("area,b\n1.2 km,2\n7 km,3\n", r"column `area` holds numbers with a unit \('1.2 km'\); write the numbers"),
        ('area,b\n900,2\n"1,200",3\n999,4\n', r"column `area` holds numbers with commas \('1,200'\)"),
        ("Sales of May\n\narea,b\n1,2\n", r"one name in its header \('Sales of May'\) and 2 values.*lines above"),
        ("sep=;\narea;b\n1;2\n", "begins with the line sep=, which Excel alone understands; remove that line"),
        (
            "area,b\n" + "".join(f"{i},1\n" for i in range(40)) + "n/a?,1\n",
            r"row 41: column `area` holds 'n/a\?', which is not a number \(97.56 % of the column are\); correct it",
        ),
    ],
)  # fmt: skip
def test_broken_text_files(write, content, match):
    path = write(content)
    with pytest.raises(ValueError, match=match) as error:
        read(path)
    assert one_line(error)
    assert "house.csv" in str(error.value)


def test_an_unclosed_quotation_mark_far_into_the_file(write, monkeypatch):
    monkeypatch.setattr(delimited, "_BLOCK_BYTES", 1 << 12)
    with pytest.raises(ValueError, match="is there a quotation mark that is never closed") as error:
        read(write('a,b\n1,"2\n' + "3,4\n" * 10_000))
    assert one_line(error)


def packed(text: str, name: str) -> bytes:
    return gzip.compress(text.encode()) if name.endswith(".gz") else text.encode()


@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.csv.gz", "t.tsv.gz"])
@pytest.mark.parametrize(
    "broken",
    ['{0}{s}"x{0}', '{0}{s}"x" y', '"{0}{s}x'],
    ids=["never closed", "text after a quotation", "in the middle"],
)
def test_a_quotation_in_the_wrong_place_never_swallows_rows(write, name, broken):
    separator = "\t" if ".tsv" in name else ","
    lines = [f"{i}{separator}x{i}" for i in range(1000)]
    lines[399] = broken.format(399, s=separator)
    lines[700] = f'700{separator}"a\nb"'  # a line break as it should be
    with pytest.raises(ValueError, match="quotation") as error:
        read(write(packed("\n".join([f"a{separator}b", *lines]) + "\n", name), name))
    assert one_line(error)
    assert "row 400" in str(error.value)


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "t.tsv.gz"])
def test_line_breaks_in_values_are_noted_with_their_row(write, name):
    separator = "\t" if ".tsv" in name else ","
    lines = [f'{i}{separator}"a{chr(10) * (i == 250)}, ""{i}"" b"' for i in range(500)]
    path = write(packed("\n".join([f"a{separator}b", *lines]) + "\n", name), name)
    with pytest.warns(DapcalWarning, match=rf"{name}, row 251: column `b` holds a line break within quotation marks;"):
        table = read(path)
    assert len(table) == 500
    assert table["b"][250].as_py() == 'a\n, "250" b'


def test_inch_marks_are_no_quotations(write):
    lines = [f'{i},{i}" pipe' for i in range(1000)]
    assert len(read(write("a,b\n" + "\n".join(lines) + "\n"))) == 1000


@pytest.mark.parametrize("name", ["t.csv.gz", "t.tsv.gz"])
def test_gzip_members_are_read_whole_or_refused(write, name):
    rows = "".join(f"{i}\t{i}\n" if ".tsv" in name else f"{i},{i}\n" for i in range(1000))
    header = rows.splitlines()[0].replace("0", "a", 1).replace("0", "b") + "\n"
    members = [gzip.compress((header + rows).encode()), gzip.compress(rows.encode())]
    assert len(read(write(b"".join(members), name))) == 2000
    for cut in (1, 4, 9, len(members[1]) - 5, len(members[1]) // 2):
        with pytest.raises((OSError, ValueError), match="is damaged or incomplete") as error:
            read(write(b"".join(members)[:-cut], name))
        assert one_line(error)
    with pytest.raises(OSError, match="is damaged or incomplete"):
        read(write(b"".join(members) + b"more", name))


def test_what_nobody_looks_at_is_not_judged(write):
    path = write("area,b\n$1.50,2\n$2,3\n")
    assert read(path, drop=["area"]).to_pylist() == [{"area": "$1.50", "b": 2.0}, {"area": "$2", "b": 3.0}]


def test_kinds_of_columns_that_are_not_there_are_refused(write):
    path = write("area,b\n1,2\n")
    with pytest.raises(ValueError, match=r"house.csv has no column `Aera`; did you mean `area`\?"):
        read(path, {"Aera": "category"})
    with pytest.raises(ValueError, match="has no column `xyz`; the columns are: area, b"):
        read(path, {"xyz": "category"})


@pytest.mark.parametrize(
    "text", ["$1,200.50", "€ 5", "5 €", "12.5%", "(3%)", "12 500", "1'000'000", "7\u202f000,5", "1,5"]
)
def test_dressed_numbers_come_with_advice(write, text):
    with pytest.raises(ValueError, match="which is not a number; write it with a decimal point, and no separators"):
        list(stream(write(f'area,colour\n"{text}",red\n'), KINDS))


@pytest.mark.parametrize("text", ["01.02.2020", "2020 2021", "12-500", "x5", "A5 %", "1 2 3"])
def test_other_texts_are_no_dressed_numbers(write, text):
    assert read(write(f"area,colour\n{text},red\n"))["area"].to_pylist() == [text]


def test_codes_of_digits_and_letters_are_no_numbers_with_a_unit(write):
    assert read(write("flat,b\n12A,1\n12B,2\n7C,3\n"))["flat"].to_pylist() == ["12A", "12B", "7C"]


def test_a_few_levels_with_signs_are_a_category(write):
    table = read(write("discount,b\n" + "10%,1\n20%,1\n" * 20))
    assert set(table["discount"].to_pylist()) == {"10%", "20%"}


def test_a_few_levels_among_numbers_are_a_category(write):
    table = read(write("children,b\n" + "0,1\n1,1\n2,1\n" * 20 + "3+,1\n"))
    assert set(table["children"].to_pylist()) == {"0", "1", "2", "3+"}


@pytest.mark.parametrize(
    ("value", "told"), [("n/a?", "not a number"), ("1,5", "not a number"), ("-inf", "not a finite number")]
)
def test_a_wrong_value_in_a_later_batch_is_named_with_its_row(write, value, told):
    path = write("area,colour\n" + "1,red\n" * 1041 + f'"{value}",red\n')
    batches = stream(path, KINDS, rows=100)
    assert sum(len(next(batches)) for _ in range(10)) == 1000
    with pytest.raises(ValueError, match="row 1042: column `area` holds") as error:
        next(batches)
    assert one_line(error)
    assert told in str(error.value)
    assert f"{value!r}" in str(error.value)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("t.txt", "name it .csv if commas"),
        ("t.xls", "save it as .xlsx, or export the sheet as CSV"),
        ("t.npy", "save it with names"),
        ("t.gz", "convert it"),
        ("t", "convert it"),
    ],
)
def test_other_formats(write, name, match):
    with pytest.raises(
        ValueError, match=f"Expected a .csv, .tsv, .csv.gz, .parquet, .xlsx or .npz file, got .*{match}"
    ) as error:
        columns_of(write("a,b\n1,2\n", name))
    assert one_line(error)


def test_files_that_cannot_be_opened(tmp_path, write):
    with pytest.raises(FileNotFoundError, match=r"There is no file .*absent\.csv; check the path"):
        read(tmp_path / "absent.csv")
    with pytest.raises(IsADirectoryError, match="is a directory; name a file in it"):
        read(tmp_path)
    (tmp_path / "loop.csv").symlink_to(tmp_path / "loop.csv")
    with pytest.raises(OSError, match=r"loop\.csv.*check the path") as error:
        read(tmp_path / "loop.csv")
    assert one_line(error)
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(OSError, match=r"pipe\.csv: no regular file"):
        read(tmp_path / "pipe.csv")
    with pytest.raises(ValueError, match="Expected `rows` of at least 1, got 0"):
        stream(write("a\n1\n"), rows=0)


def test_no_permission(write, monkeypatch):
    path = write("a\n1\n")

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(path), "open", refuse)  # root may read everything
    with pytest.raises(PermissionError, match=r"house\.csv may not be read; check its permissions"):
        read(path)


def test_compressed_files_that_are_none_or_end_early(write):
    with pytest.raises(ValueError, match="is not compressed by gzip; drop the suffix"):
        read(write("a,b\n1,2\n", "t.csv.gz"))
    content = gzip.compress(os.urandom(60_000).hex().encode())
    for bytes_kept in (5, 200, len(content) - 100):
        with pytest.raises((ValueError, OSError), match=r"damaged or incomplete|never closed|no rows") as error:
            read(write(content[:bytes_kept], "t.csv.gz"))
        assert one_line(error)
    lines = gzip.compress(b"a,b\n" + b"".join(b"%d,%d\n" % (i, i * i) for i in range(50_000)))
    with pytest.raises(OSError, match="damaged or incomplete") as error:
        read(write(lines[: len(lines) // 2], "t.csv.gz"))
    assert one_line(error)


def test_broken_parquet_files(tmp_path, write):
    path = tmp_path / "t.parquet"
    pa.parquet.write_table(pa.table({"a": np.arange(5000)}), path)
    content = path.read_bytes()
    broken = {
        "damaged or incomplete": content[: len(content) // 2],
        "is damaged": content[:100] + b"\xff" * 2000 + content[2100:],
        "is not a Parquet file; if it is text, name it .csv": b"a,b\n1,2\n",
        "is empty": b"",
    }
    for match, changed in broken.items():
        with pytest.raises((ValueError, OSError), match=match) as error:
            read(write(changed, "broken.parquet"))
        assert one_line(error)


@pytest.mark.parametrize(
    ("column", "match"),
    [
        (pa.array([[1], [2]]), "column `a` holds list.*neither number nor text; flatten it"),
        (pa.array([{"b": 1}, {"b": 2}]), "column `a` holds struct"),
        (pa.array([b"1", b"2"]), "column `a` holds binary"),
        (pa.array([], pa.int64()), "has columns and no rows"),
    ],
)
def test_parquet_columns_that_are_no_columns(tmp_path, column, match):
    pa.parquet.write_table(pa.table({"a": column}), tmp_path / "t.parquet")
    with pytest.raises(ValueError, match=match) as error:
        read(tmp_path / "t.parquet")
    assert one_line(error)


def test_parquet_columns_with_one_name(tmp_path):
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["a", "a"])
    pa.parquet.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(ValueError, match="two columns named `a`"):
        read(tmp_path / "t.parquet")


@pytest.mark.parametrize(
    ("arrays", "match"),
    [
        ({"a": np.zeros(3), "b": np.zeros(2)}, "Expected arrays of one length, got others: `a` has 3, `b` has 2"),
        ({"a": np.zeros((2, 2, 2))}, r"got array `a` of shape \(2, 2, 2\); save it as \(rows, columns\)"),
        ({"a": np.float64(1)}, r"got array `a` of shape \(\)"),
        ({"a": np.zeros((3, 0))}, r"got array `a` of shape \(3, 0\)"),
        ({"a": np.array([1, "x"], object)}, "array `a` holds Python objects, which are not loaded"),
        ({"a": np.zeros(2, complex)}, "array `a` holds complex128, which is neither number nor text"),
        ({"x": np.zeros((2, 1)), "x0": np.zeros(2)}, "two columns named `x0`"),
        ({"a": np.zeros(0)}, "has no rows"),
        ({}, "has no rows"),
    ],
)
def test_npz_files_that_are_no_tables(tmp_path, arrays, match):
    np.savez(tmp_path / "t.npz", **arrays)
    with pytest.raises(ValueError, match=match) as error:
        read(tmp_path / "t.npz")
    assert one_line(error)


def test_broken_npz_files(tmp_path, write):
    np.savez_compressed(tmp_path / "t.npz", a=np.random.default_rng(0).normal(size=5000))
    content = (tmp_path / "t.npz").read_bytes()
    with zipfile.ZipFile(tmp_path / "sheet.npz", "w") as file:
        file.writestr("sheet.xml", "<a/>")
    for changed, match in [
        (content[: len(content) // 2], "damaged or incomplete"),
        (content[:500] + b"\xff" * 500 + content[1000:], "damaged or incomplete"),
        (b"a,b\n1,2\n", "is not an npz file; write it with numpy.savez"),
        ((tmp_path / "sheet.npz").read_bytes(), "`sheet.xml` is not an array"),
    ]:
        with pytest.raises((ValueError, OSError), match=match) as error:
            read(write(changed, "broken.npz"))
        assert one_line(error)


@pytest.mark.parametrize("kind", ["number", "category"])
def test_types_that_can_be_neither(tmp_path, kind):
    pa.parquet.write_table(pa.table({"day": pa.array([0, 1], pa.date32())}), tmp_path / "t.parquet")
    with pytest.raises(ValueError, match=r"t\.parquet: Expected (numbers|texts) in column `day`, got date32"):
        next(stream(tmp_path / "t.parquet", {"day": kind}))


@settings(derandomize=True, max_examples=80, deadline=None)
@given(st.binary(max_size=300), st.sampled_from([".csv", ".tsv", ".csv.gz", ".parquet", ".npz"]), st.booleans())
def test_whatever_the_bytes_the_answer_is_a_table_or_one_line(tmp_path_factory, content, suffix, starts_right):
    start = {".parquet": b"PAR1", ".npz": b"PK\x03\x04", ".csv.gz": b"\x1f\x8b"}.get(suffix, b"a,b\n")
    path = tmp_path_factory.getbasetemp() / f"fuzz{suffix}"
    path.write_bytes(start * starts_right + content)
    try:
        table = read(path)
    except (ValueError, OSError) as error:
        assert "\n" not in str(error)  # noqa: PT017
        assert path.name in str(error)  # noqa: PT017
        assert not isinstance(error, pa.ArrowException | UnicodeDecodeError)  # noqa: PT017
    else:
        assert len(table) > 0


def test_without_pyarrow_the_error_names_the_extra(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("dapcal.tables")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"Tables need pyarrow; install it with: pip install 'dapcal\[tables\]'"):
        importlib.import_module("dapcal.tables")


@pytest.mark.parametrize("word", ["unknown", "none", ".", "Unknown", "n.a.", "--", "#DIV/0!"])
def test_words_among_numbers_stand_for_missing_ones(write, word):
    path = write(f"area,colour\n1,red\n{word},{word}\n3,{word}\n")
    assert read(path).to_pydict() == {"area": [1.0, None, 3.0], "colour": ["red", word, word]}
    assert whole(path, KINDS, rows=1) == {"area": [1.0, None, 3.0], "colour": ["red", word, word]}
    assert note_of(read(path), "area") == [f"column `area`: '{word}' taken as missing (1 row)"]
    assert note_of(read(path), "colour") == []


def test_common_spellings_of_missing_values_need_no_note(write):
    assert note_of(read(write("area\n1\nNA\n3\n")), "area") == []
    assert note_of(read(write("area\n1\n?\n3\n")), "area") == ["column `area`: '?' taken as missing (1 row)"]


def test_words_alone_are_levels(write):
    assert read(write("area,b\nunknown,1\nnone,2\n")).to_pydict()["area"] == ["unknown", "none"]
    assert whole(write("area,colour\nunknown,1\n"), KINDS) == {"area": [None], "colour": ["1"]}
