// Package unshared explains why two spaces are not one.
//
// Instances share what they store if all declarations of their workers agree. Some declarations
// differ because users intend it, such as the model. Some differ by accident, such as the seed of
// the hashes, and then nothing is shared and no error shows it. This package separates the two
// cases, and describes how to fix an accident.
package unshared

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"lookaside/ipc/wire"
)

// Space is a worker's declaration of its pages. A number that is 0 is unknown.
type Space struct {
	PageTokens    int64
	PageBytes     int64
	PagesPerChunk int64
	DigestBytes   int64
	Fields        []wire.Field // sorted by key; none: unknown
}

// Difference is one field in which two spaces differ.
type Difference struct {
	Field  string `json:"field"`
	Ours   string `json:"ours"`
	Theirs string `json:"theirs"`
}

// absent is the value of a field that a space does not have.
const absent = "(not given)"

// Differences returns the fields in which two spaces differ, numbers first. It leaves out fields
// that one of them does not know.
func Differences(ours, theirs *Space) []Difference {
	var out []Difference
	number := func(field string, o, t int64) {
		if o != t && o != 0 && t != 0 {
			out = append(out, Difference{field, strconv.FormatInt(o, 10), strconv.FormatInt(t, 10)})
		}
	}
	number("page_tokens", ours.PageTokens, theirs.PageTokens)
	number("page_bytes", ours.PageBytes, theirs.PageBytes)
	number("pages_per_chunk", ours.PagesPerChunk, theirs.PagesPerChunk)
	number("digest_bytes", ours.DigestBytes, theirs.DigestBytes)
	o, t := ours.Fields, theirs.Fields
	if len(o) == 0 || len(t) == 0 {
		return out
	}
	for len(o) > 0 || len(t) > 0 { // both are sorted by key
		switch {
		case len(t) == 0 || len(o) > 0 && o[0].Key < t[0].Key:
			out = append(out, Difference{o[0].Key, o[0].Value, absent})
			o = o[1:]
		case len(o) == 0 || t[0].Key < o[0].Key:
			out = append(out, Difference{t[0].Key, absent, t[0].Value})
			t = t[1:]
		default:
			if o[0].Value != t[0].Value {
				out = append(out, Difference{o[0].Key, o[0].Value, t[0].Value})
			}
			o, t = o[1:], t[1:]
		}
	}
	return out
}

// A Cause is a difference that users make by accident.
type Cause struct {
	Difference
	What string `json:"what"` // the field in the words of users
	Fix  string `json:"fix"`
}

func (c *Cause) String() string {
	return fmt.Sprintf("%s differs, %q here and %q there; %s", c.What, short(c.Ours),
		short(c.Theirs), c.Fix)
}

// kinds lists the fields that differ by accident. A difference in an earlier field explains one in
// a later field, and in the fields that depend on it.
var kinds = []struct {
	field, what, fix string
	brings           []string
}{
	{"vllm", "the release of vLLM", "run the same release everywhere",
		[]string{"hash_keys", "none_hash", "attention", "isa", "shapes", "page", "groups"}},
	{"hash", "the hash algorithm",
		"pass the same --prefix-caching-hash-algo everywhere, such as sha256_cbor",
		[]string{"none_hash", "hash_keys", "digest_bytes"}},
	{"none_hash", "the seed of the hashes",
		"start all with the same PYTHONHASHSEED, such as PYTHONHASHSEED=0", nil},
	{"hash_keys", "the release of Python",
		"run the same release everywhere, or pass --prefix-caching-hash-algo sha256_cbor", nil},
	{"page_tokens", "the block size", "pass the same --block-size everywhere",
		[]string{"page_bytes", "pages_per_chunk", "hash_tokens", "page", "shapes", "groups"}},
	{"pages_per_chunk", "lookaside.chunk_tokens (in blocks)",
		"set the same lookaside.chunk_tokens everywhere", nil},
	{"dtype", "the data type", "pass the same --dtype everywhere", []string{"page_bytes", "page",
		"shapes", "groups", "attention", "isa"}},
	{"kv_dtype", "the data type of the KV cache", "pass the same --kv-cache-dtype everywhere",
		[]string{"page_bytes", "page", "shapes", "groups", "attention", "isa"}},
	{"revision", "the revision of the model", "pass the same --revision everywhere",
		[]string{"weights"}},
	{"weights", "the model's files",
		"have all read the same files; copies must keep the files' times (cp -p, rsync -t)", nil},
}

// Accident returns the causes if all differences are accidents, else none.
func Accident(differences []Difference) []Cause {
	var causes []Cause
	explained := map[string]bool{}
	for _, k := range kinds {
		i := slices.IndexFunc(differences, func(d Difference) bool { return d.Field == k.field })
		if i < 0 || explained[k.field] {
			continue
		}
		causes = append(causes, Cause{differences[i], k.what, k.fix})
		explained[k.field] = true
		for _, b := range k.brings {
			explained[b] = true
		}
	}
	for _, d := range differences {
		if !explained[d.Field] {
			return nil
		}
	}
	return causes
}

// Text describes the difference and its fix in one line.
func Text(causes []Cause) string {
	parts := make([]string, 0, len(causes))
	for i := range causes {
		parts = append(parts, causes[i].String())
	}
	return strings.Join(parts, ". Also ")
}

// short cuts a value such as a digest or a path to the part that distinguishes it.
func short(s string) string {
	if len(s) <= 40 {
		return s
	}
	r := []rune(s)
	return string(r[:min(len(r), 16)]) + "…" + string(r[max(0, len(r)-8):])
}
