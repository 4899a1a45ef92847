package bytesize

import (
	"math"
	"math/rand/v2"
	"strings"
	"testing"
)

func TestParse(t *testing.T) {
	for text, want := range map[string]int64{
		"0": 0, "1": 1, "1048576": 1 << 20, " 42 ": 42, "7B": 7, "7 b": 7,
		"4G": 4 << 30, "4g": 4 << 30, "4Gi": 4 << 30, "4GiB": 4 << 30, "4 gib": 4 << 30,
		"500MiB": 500 << 20, "64K": 64 << 10, "2T": 2 << 40, "1.5G": 3 << 29, "0.5k": 512,
		"007M":                7 << 20,
		"9223372036854775807": math.MaxInt64, "8388607T": 8388607 << 40,
	} {
		if got, err := Parse(text); err != nil || got != want {
			t.Errorf("%q: %d, %v; want %d", text, got, err, want)
		}
	}
	for _, text := range []string{
		"", " ", "G", "-1", "-1G", "+1", "1e3", "0x10", "1_000", "1,000", "4 G B", "4P", "4Gb/s",
		"1/2",
		".5G", "5.G", "1.2.3", ".", "0.1", "1.0000001K", "8388608T", "9223372036854775808", "NaN",
		"inf", "٤G",
		strings.Repeat("9", 1000),
	} {
		if got, err := Parse(text); err == nil {
			t.Errorf("%q accepted as %d", text, got)
		} else if len(err.Error()) > 200 {
			t.Errorf("an error of %d bytes for %.40q", len(err.Error()), text)
		}
	}
	_, err := Parse("4GB")
	if err == nil {
		t.Fatal("4GB is accepted")
	}
	for _, part := range []string{"4GB", "ambiguous", "GiB"} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%q does not contain %q", err, part)
		}
	}
}

func TestFormat(t *testing.T) {
	for n, want := range map[int64]string{
		0: "0B", 1: "1B", 1023: "1023B", 1024: "1KiB", 1536: "1.5KiB", 1 << 20: "1MiB",
		500 << 20: "500MiB",
		4 << 30:   "4GiB", 3 << 29: "1.5GiB", 1<<30 + 1: "1GiB", 5 << 40: "5TiB",
		100 << 40: "100TiB",
		-1 << 20:  "-1MiB", math.MaxInt64: "8388608TiB", math.MinInt64: "-8388608TiB",
	} {
		if got := Format(n); got != want {
			t.Errorf("%d: %q, want %q", n, got, want)
		}
	}
	r := rand.New(rand.NewPCG(1, 1))
	for range 2000 {
		n := r.Int64N(1 << (1 + r.IntN(60)))
		back, err := Parse(Format(n))
		if err != nil && !strings.Contains(err.Error(), "whole number") {
			t.Fatalf("%d is written %q: %v", n, Format(n), err)
		}
		if err == nil && math.Abs(float64(back-n)) > float64(n)/200 {
			t.Fatalf("%d is written %q, read as %d", n, Format(n), back)
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{"4G", "1.5GiB", "500MiB", "0", "-1", "1e9", "9223372036854775808"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		n, err := Parse(s)
		if err != nil {
			return
		}
		if n < 0 {
			t.Fatalf("%q: %d", s, n)
		}
		if again, err := Parse(Format(n)); n < 1024 && (err != nil || again != n) {
			t.Fatalf("%q: %d, written %q: %v", s, n, Format(n), err)
		}
	})
}
