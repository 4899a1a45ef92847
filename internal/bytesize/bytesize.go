// Package bytesize reads and writes sizes in bytes as people write them. Its name leaves "size" to
// variables.
package bytesize

import (
	"fmt"
	"math"
	"math/big"
	"strconv"
	"strings"
)

const maxSizeText = 32 // longest size that anyone means

var sizeUnits = map[string]uint{
	"": 0, "b": 0,
	"k": 10, "ki": 10, "kib": 10,
	"m": 20, "mi": 20, "mib": 20,
	"g": 30, "gi": 30, "gib": 30,
	"t": 40, "ti": 40, "tib": 40,
}

// Parse reads a size in bytes: "1048576", "4G", "500MiB", "1.5T". The units are powers of 1024, in
// either case, with or without "i" and "iB". "GB" is refused, since half its readers mean 10⁹. A
// size is not negative and is a whole number of bytes.
func Parse(s string) (int64, error) {
	text := strings.TrimSpace(s)
	if len(text) > maxSizeText {
		return 0, fmt.Errorf("size %.*q…: too long", maxSizeText, text)
	}
	end := strings.IndexFunc(text, func(c rune) bool { return (c < '0' || c > '9') && c != '.' })
	if end < 0 {
		end = len(text)
	}
	number, unit := text[:end], strings.TrimSpace(text[end:])
	shift, ok := sizeUnits[strings.ToLower(unit)]
	if !ok {
		if l := strings.ToLower(unit); l == "kb" || l == "mb" || l == "gb" || l == "tb" {
			return 0, fmt.Errorf("size %q: %s is ambiguous, write %s (powers of 1024)", s, unit,
				unit[:1]+"iB")
		}
		return 0, fmt.Errorf("size %q: unknown unit %q, one of K, M, G, T (powers of 1024)", s,
			unit)
	}
	// Rat refuses a lone dot and an empty number, but takes "1." and ".5". A dot must stand between
	// digits here.
	if number == "" || number[0] == '.' || number[len(number)-1] == '.' {
		return 0, fmt.Errorf("size %q: want a number and a unit, such as 500M or 4G", s)
	}
	value, ok := new(big.Rat).SetString(number)
	if !ok {
		return 0, fmt.Errorf("size %q: want a number and a unit, such as 500M or 4G", s)
	}
	value.Mul(value, new(big.Rat).SetInt64(1<<shift))
	if !value.IsInt() {
		return 0, fmt.Errorf("size %q: not a whole number of bytes", s)
	}
	if !value.Num().IsInt64() {
		return 0, fmt.Errorf("size %q: larger than %d bytes", s, int64(math.MaxInt64))
	}
	return value.Num().Int64(), nil
}

// Format writes a size for people, as Parse reads it. It is exact for a multiple of the unit, and
// else rounded to two decimals ("4GiB", "1.46GiB", "512B").
func Format(n int64) string {
	if n < 0 {
		return "-" + Format(-max(n, -math.MaxInt64))
	}
	for _, u := range []struct {
		shift uint
		name  string
	}{{40, "TiB"}, {30, "GiB"}, {20, "MiB"}, {10, "KiB"}} {
		if n >= 1<<u.shift {
			s := strconv.FormatFloat(float64(n)/float64(int64(1)<<u.shift), 'f', 2, 64)
			return strings.TrimRight(strings.TrimRight(s, "0"), ".") + u.name
		}
	}
	return strconv.FormatInt(n, 10) + "B"
}
