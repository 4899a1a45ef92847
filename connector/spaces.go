package connector

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/vmihailenco/msgpack/v5"

	"lookaside/ipc/wire"
	"lookaside/tiers"
	"lookaside/tiers/engine"
)

// maxSlotBytes bounds pages_per_chunk * page_bytes, so that no arithmetic on slots can wrap.
const maxSlotBytes = 1 << 40

// minPageBytes keeps an index entry small compared with its page. The engine has the same bound.
const minPageBytes = 256

// space is one kind of pages. A worker declares it; schedulers and further workers join it.
// Server.mu guards it.
type space struct {
	id          engine.SpaceID
	fingerprint tiers.Fingerprint
	geometry    tiers.Geometry
	declared    *tiers.Space
	hello       wire.Hello // what the first worker declared; the space owns its Fields
	sessions    int        // workers and schedulers that are connected
	// otherNames: another space has the same pages under other names. Without a lock.
	otherNames atomic.Bool
}

// instanceKey names one rank of one vLLM instance.
type instanceKey struct {
	id   string
	rank uint32
}

// instance leads a scheduler to the space of its worker. It exists while it has sessions. Server.mu
// guards it.
type instance struct {
	space    *space
	workers  int
	sessions int
}

// mismatch is one field on which two declarations differ.
type mismatch struct {
	field, want, got string
}

// fingerprintOf returns the fingerprint of the space that h declares: the SHA-256 of the canonical
// msgpack of its geometry and fields. Fields are sorted by key and unique, so equal declarations
// have equal bytes.
func fingerprintOf(h *wire.Hello) (tiers.Fingerprint, error) {
	fields := make([][2]string, 0, len(h.Fields))
	for _, f := range h.Fields {
		fields = append(fields, [2]string{f.Key, f.Value})
	}
	b, err := msgpack.Marshal([]any{h.PageTokens, h.PageBytes, h.PagesPerChunk, h.DigestBytes,
		fields})
	if err != nil {
		return tiers.Fingerprint{}, fmt.Errorf("fingerprint: %w", err)
	}
	return tiers.FingerprintOf(b), nil
}

// fieldsOf returns the fields of h as a map.
func fieldsOf(h *wire.Hello) map[string]string { return mapOf(h.Fields) }

func mapOf(fields []wire.Field) map[string]string {
	out := make(map[string]string, len(fields))
	for _, f := range fields {
		out[f.Key] = f.Value
	}
	return out
}

// withFields returns h with further fields, which replace fields of the same keys.
func withFields(h *wire.Hello, more []wire.Field) *wire.Hello {
	if len(more) == 0 {
		return h
	}
	out := *h
	out.Fields = slices.DeleteFunc(slices.Clone(h.Fields), func(f wire.Field) bool {
		return slices.ContainsFunc(more, func(m wire.Field) bool { return m.Key == f.Key })
	})
	out.Fields = append(out.Fields, more...)
	slices.SortFunc(out.Fields, func(a, b wire.Field) int { return strings.Compare(a.Key, b.Key) })
	return &out
}

// geometryOf returns the geometry that a worker declares, or the field that is out of bounds.
func geometryOf(h *wire.Hello, arenaLimitBytes int64) (tiers.Geometry, *mismatch) {
	bad := func(field, want string, got uint64) (tiers.Geometry, *mismatch) {
		return tiers.Geometry{}, &mismatch{field, want, strconv.FormatUint(got, 10)}
	}
	if h.PageTokens == 0 || h.PageTokens > 1<<20 {
		return bad("page_tokens", "1 to 1048576", uint64(h.PageTokens))
	}
	if h.PagesPerChunk == 0 || h.PagesPerChunk > 4096 {
		return bad("pages_per_chunk", "1 to 4096", uint64(h.PagesPerChunk))
	}
	if h.DigestBytes != 8 && h.DigestBytes != 16 && h.DigestBytes != 32 {
		return bad("digest_bytes", "8, 16 or 32", uint64(h.DigestBytes))
	}
	limit := min(uint64(arenaLimitBytes), maxSlotBytes) / uint64(h.PagesPerChunk)
	if h.PageBytes < minPageBytes || h.PageBytes > limit {
		return bad("page_bytes", fmt.Sprintf("%d to %d (a chunk of %d pages must fit the arena)",
			minPageBytes, limit, h.PagesPerChunk), h.PageBytes)
	}
	return tiers.Geometry{
		PageBytes:     int64(h.PageBytes),
		PagesPerChunk: int(h.PagesPerChunk),
		PageTokens:    int(h.PageTokens),
		DigestBytes:   int(h.DigestBytes),
	}, nil
}

// elements maps the names that vLLM and PyTorch have for the element type of a page to the names
// that codecs use.
var elements = map[string]string{
	"bfloat16": "bfloat16", "float16": "float16", "half": "float16", "float32": "float32",
	"float": "float32",
	"fp8":   "float8", "fp8_e4m3": "float8", "fp8_e5m2": "float8", "fp8_inc": "float8",
	"float8_e4m3fn": "float8", "float8_e5m2": "float8",
}

// elementOf returns the element type of a space's pages by the fields that its worker declared: the
// type of the KV cache, or the model's if that is "auto"; "encoded" if the worker encodes pages, so
// that no codec of a tier takes what they are made of for numbers. It returns "" if the fields do
// not name one that is known.
func elementOf(fields []wire.Field) string {
	named := map[string]string{}
	for _, f := range fields {
		named[f.Key] = strings.TrimPrefix(f.Value, "torch.")
	}
	if named["encoding"] != "" {
		return "encoded"
	}
	if t := named["kv_dtype"]; t != "" && t != "auto" {
		return elements[t]
	}
	return elements[named["dtype"]]
}

// compare returns the fields on which got differs from want. With partial, a number that is 0 in
// got and a field that got lacks count as equal, except the epoch: an epoch without a name is one.
func compare(want, got *wire.Hello, partial bool) []mismatch {
	var diff []mismatch
	number := func(field string, w, g uint64) {
		if w != g && !(partial && g == 0) {
			diff = append(diff, mismatch{field, strconv.FormatUint(w, 10),
				strconv.FormatUint(g, 10)})
		}
	}
	number("page_tokens", uint64(want.PageTokens), uint64(got.PageTokens))
	number("page_bytes", want.PageBytes, got.PageBytes)
	number("pages_per_chunk", uint64(want.PagesPerChunk), uint64(got.PagesPerChunk))
	number("digest_bytes", uint64(want.DigestBytes), uint64(got.DigestBytes))
	// Both lists are sorted by key, so one pass compares them.
	w, g := want.Fields, got.Fields
	for len(w) > 0 || len(g) > 0 {
		switch {
		case len(g) == 0 || len(w) > 0 && w[0].Key < g[0].Key:
			if !partial || w[0].Key == EpochField {
				diff = append(diff, mismatch{w[0].Key, w[0].Value, "(not given)"})
			}
			w = w[1:]
		case len(w) == 0 || g[0].Key < w[0].Key:
			diff = append(diff, mismatch{g[0].Key, "(not given)", g[0].Value})
			g = g[1:]
		default:
			if w[0].Value != g[0].Value {
				diff = append(diff, mismatch{w[0].Key, w[0].Value, g[0].Value})
			}
			w, g = w[1:], g[1:]
		}
	}
	return diff
}
