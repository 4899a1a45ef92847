package wire

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"strings"
	"testing"

	"github.com/vmihailenco/msgpack/v5"
)

// An lmcacheVector is a golden request of LMCache's, or frames to refuse.
type lmcacheVector struct {
	Name    string          `json:"name"`
	Frames  []string        `json:"frames"` // hex
	Valid   bool            `json:"valid"`
	Why     string          `json:"why,omitempty"`
	Request *lmcacheRequest `json:"request,omitempty"`
	Answer  []string        `json:"answer,omitempty"` // hex of the frames that say AnswerTokens
}

type lmcacheRequest struct {
	Cleanup     bool     `json:"cleanup"`
	ID          string   `json:"lookup_id"`
	Hashes      []string `json:"hashes"` // hex, one each
	DigestBytes int      `json:"digest_bytes"`
	Offsets     []uint32 `json:"offsets"`
	Tagged      bool     `json:"tagged"`
}

const answerTokens = 768

// lmcacheFrame encodes what LMCache would with msgspec: pairs in order, shortest form.
func lmcacheFrame(pairs ...any) string {
	var b bytes.Buffer
	enc := msgpack.NewEncoder(&b)
	enc.UseCompactInts(true)
	if err := enc.EncodeMapLen(len(pairs) / 2); err != nil {
		panic(err)
	}
	for _, p := range pairs {
		if err := enc.Encode(p); err != nil {
			panic(err)
		}
	}
	return hex.EncodeToString(b.Bytes())
}

func packed(v any) string {
	var b bytes.Buffer
	enc := msgpack.NewEncoder(&b)
	enc.UseCompactInts(true)
	if err := enc.Encode(v); err != nil {
		panic(err)
	}
	return hex.EncodeToString(b.Bytes())
}

func text16(s string) string { return hex.EncodeToString([]byte(s)) }

func lmcacheVectors() []lmcacheVector {
	type list = []any
	digest := func(fill byte) []byte { return bytes.Repeat([]byte{fill}, 32) }
	hash := func(v uint64) string { return fmt.Sprintf("%016x", v) }
	var out []lmcacheVector
	good := func(name string, req lmcacheRequest, frames ...string) {
		v := lmcacheVector{Name: name, Frames: frames, Valid: true, Request: &req}
		switch {
		case req.Cleanup:
		case len(frames) == 4:
			v.Answer = []string{frames[0], fmt.Sprintf("%08x", answerTokens)}
		default:
			v.Answer = []string{lmcacheFrame("type", "LookupResponseMsg", "lookup_id", req.ID,
				"num_hit_tokens", uint64(answerTokens))}
		}
		out = append(out, v)
	}
	bad := func(why string, frames ...string) {
		for i := range frames {
			frames[i] = strings.ReplaceAll(frames[i], " ", "")
		}
		out = append(out, lmcacheVector{Name: "refuse: " + why, Frames: frames, Why: why})
	}

	good("integer hashes", lmcacheRequest{ID: "req-1", Hashes: []string{hash(1), hash(1 << 40),
		hash(math.MaxInt64)}, DigestBytes: 8, Offsets: []uint32{256, 256, 100}},
		lmcacheFrame("type", "LookupRequestMsg", "lookup_id", "req-1", "hashes",
			list{1, 1 << 40, math.MaxInt64}, "offsets", list{256, 256, 100}, "request_configs",
			nil))
	good("signed and unsigned hashes",
		lmcacheRequest{ID: "é", Hashes: []string{hash(math.MaxUint64), hash(1 << 63),
			hash(0x8000000000000000), hash(0xffffffffffffff80)}, DigestBytes: 8,
			Offsets: []uint32{1, 2, 3, 4}},
		lmcacheFrame("type", "LookupRequestMsg", "lookup_id", "é", "hashes",
			list{-1, uint64(1 << 63), math.MinInt64, -128}, "offsets", list{1, 2, 3, 4},
			"request_configs", nil))
	good("byte hashes and configs", lmcacheRequest{ID: "req-2",
		Hashes:      []string{hex.EncodeToString(digest(1)), hex.EncodeToString(digest(2))},
		DigestBytes: 32, Offsets: []uint32{256, 256}},
		lmcacheFrame("type", "LookupRequestMsg", "lookup_id", "req-2", "hashes",
			list{digest(1), digest(2)}, "offsets", list{256, 256},
			"request_configs", asMap("lmcache.skip_save", "1", "n", 3, "f", 1.5, "b", true, "z",
				nil)))
	good("tagged", lmcacheRequest{ID: "req-3", Hashes: []string{hash(7)}, DigestBytes: 8,
		Offsets: []uint32{256}, Tagged: true},
		lmcacheFrame("type", "LookupRequestMsg", "lookup_id", "req-3", "hashes", list{7}, "offsets",
			list{256}, "request_configs", asMap("lmcache.tag.tenant", "a")))
	good("no hashes", lmcacheRequest{ID: "short", Hashes: []string{}, Offsets: []uint32{}},
		lmcacheFrame("type", "LookupRequestMsg", "lookup_id", "short", "hashes", list{}, "offsets",
			list{}, "request_configs", nil))
	good("fields in another order, no configs", lmcacheRequest{ID: "o", Hashes: []string{hash(9)},
		DigestBytes: 8, Offsets: []uint32{16}},
		lmcacheFrame("offsets", list{16}, "hashes", list{9}, "lookup_id", "o", "type",
			"LookupRequestMsg"))
	good("cleanup", lmcacheRequest{Cleanup: true, ID: "req-1", Hashes: []string{},
		Offsets: []uint32{}},
		lmcacheFrame("type", "LookupCleanupMsg", "lookup_id", "req-1"))
	good("multipart", lmcacheRequest{ID: "req-4", Hashes: []string{hash(1), hash(math.MaxUint64)},
		DigestBytes: 8, Offsets: []uint32{256, 12}},
		text16("req-4"), packed(list{1, -1}), packed(list{256, 12}), "")
	good("multipart with configs", lmcacheRequest{ID: "req-5", Hashes: []string{hash(3)},
		DigestBytes: 8, Offsets: []uint32{256}},
		text16("req-5"), packed(list{3}), packed(list{256}), text16("a%1@b%2"))
	good("multipart tagged", lmcacheRequest{ID: "req-6", Hashes: []string{hash(3)}, DigestBytes: 8,
		Offsets: []uint32{256}, Tagged: true},
		text16("req-6"), packed(list{3}), packed(list{256}), text16("a%1@lmcache.tag.user%bob"))

	lookup := func(pairs ...any) string {
		return lmcacheFrame(
			append([]any{"type", "LookupRequestMsg"}, pairs...)...)
	}
	bad("no frames")
	bad("two frames", text16("id"), packed(list{1}))
	bad("five frames", text16("id"), packed(list{1}), packed(list{1}), "", "")
	bad("an empty frame", "")
	bad("an array", "93 01 02 03")
	bad("map bomb", "df ffffffff")
	bad("map bomb of 8 bytes", "df ffffffff a1 61 01")
	bad("nesting", strings.Repeat("81a474797065", 512))
	bad("a pickle", hex.EncodeToString(
		[]byte("\x80\x04\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x04true\x94\x85\x94R\x94.")))
	bad("trailing bytes", lmcacheFrame("type", "LookupCleanupMsg", "lookup_id", "x")+"00")
	bad("no type", lmcacheFrame("lookup_id", "x"))
	bad("unknown type", lmcacheFrame("type", "LookupResponseMsg", "lookup_id", "x"))
	bad("type as a number", lmcacheFrame("type", 1, "lookup_id", "x"))
	bad("duplicate field", lmcacheFrame("type", "LookupCleanupMsg", "lookup_id", "x", "lookup_id",
		"y"))
	bad("unknown field", lmcacheFrame("type", "LookupCleanupMsg", "lookup_id", "x", "pickled", "y"))
	bad("more fields than there are", lmcacheFrame("type", "LookupCleanupMsg", "lookup_id", "x",
		"a", 1, "b", 1, "c", 1, "d", 1))
	bad("a key that is no string", "81 01 a161")
	bad("cleanup with hashes", lmcacheFrame("type", "LookupCleanupMsg", "lookup_id", "x", "hashes",
		list{}, "offsets", list{}))
	bad("lookup without offsets", lookup("lookup_id", "x", "hashes", list{1}))
	bad("empty id", lmcacheFrame("type", "LookupCleanupMsg", "lookup_id", ""))
	bad("id above the limit", lmcacheFrame("type", "LookupCleanupMsg", "lookup_id",
		strings.Repeat("x", 257)))
	bad("id as bytes", lmcacheFrame("type", "LookupCleanupMsg", "lookup_id", []byte("x")))
	bad("id not UTF-8", "82 a474797065 b04c6f6f6b7570436c65616e75704d7367 a96c6f6f6b75705f6964 a1ff")
	bad("hashes bomb", "81 a6686173686573 dd ffffffff")
	bad("a float among the hashes", lookup("lookup_id", "x", "hashes", list{1.5}, "offsets",
		list{1}))
	bad("a list among the hashes", lookup("lookup_id", "x", "hashes", list{list{1}}, "offsets",
		list{1}))
	bad("a string among the hashes", lookup("lookup_id", "x", "hashes", list{"12345678"}, "offsets",
		list{1}))
	bad("an empty hash", lookup("lookup_id", "x", "hashes", list{[]byte{}}, "offsets", list{1}))
	bad("a hash of 33 bytes", lookup("lookup_id", "x", "hashes", list{make([]byte, 33)}, "offsets",
		list{1}))
	bad("hashes of two lengths", lookup("lookup_id", "x", "hashes", list{digest(1), digest(1)[:31]},
		"offsets", list{1, 1}))
	bad("hashes of two kinds", lookup("lookup_id", "x", "hashes", list{1, digest(1)}, "offsets",
		list{1, 1}))
	bad("fewer offsets than hashes", lookup("lookup_id", "x", "hashes", list{1, 2}, "offsets",
		list{1}))
	bad("more offsets than hashes", lookup("lookup_id", "x", "hashes", list{1}, "offsets",
		list{1, 2}))
	bad("a negative offset", lookup("lookup_id", "x", "hashes", list{1}, "offsets", list{-1}))
	bad("offsets that sum above 32 bits", lookup("lookup_id", "x", "hashes", list{1, 2}, "offsets",
		list{uint32(1 << 31), uint32(1 << 31)}))
	bad("configs as a list", lookup("lookup_id", "x", "hashes", list{1}, "offsets", list{1},
		"request_configs", list{}))
	bad("nested configs", lookup("lookup_id", "x", "hashes", list{1}, "offsets", list{1},
		"request_configs", asMap("a", list{1})))
	bad("configs bomb", "85"+lookup("lookup_id", "x", "hashes", list{1}, "offsets", list{1})[2:]+
		packed("request_configs")+"df ffffffff")
	bad("multipart id not UTF-8", "ff", packed(list{1}), packed(list{1}), "")
	bad("multipart empty id", "", packed(list{1}), packed(list{1}), "")
	bad("multipart id above the limit", strings.Repeat("61", 257), packed(list{1}), packed(list{1}),
		"")
	bad("multipart hashes bomb", text16("x"), "dd ffffffff 000000", packed(list{1}), "")
	bad("multipart trailing bytes after hashes", text16("x"), packed(list{1})+"00", packed(list{1}),
		"")
	bad("multipart trailing bytes after offsets", text16("x"), packed(list{1}),
		packed(list{1})+"00", "")
	bad("multipart configs not UTF-8", text16("x"), packed(list{1}), packed(list{1}), "ff")
	bad("multipart configs above the limit", text16("x"), packed(list{1}), packed(list{1}),
		strings.Repeat("61", 4097))
	return out
}

type orderedMap []any

// asMap is a map whose encoding keeps the order of its pairs.
func asMap(pairs ...any) orderedMap { return pairs }

func (m orderedMap) EncodeMsgpack(enc *msgpack.Encoder) error {
	err := enc.EncodeMapLen(len(m) / 2)
	for _, p := range m {
		err = errors.Join(err, enc.Encode(p))
	}
	return err
}

func frames(t testing.TB, hexes []string) [][]byte {
	var out [][]byte
	for _, h := range hexes {
		b, err := hex.DecodeString(h)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, b)
	}
	return out
}

func TestLMCacheGolden(t *testing.T) {
	golden(t, lmcacheFile, lmcacheVectors())
	b, err := os.ReadFile(lmcacheFile)
	if err != nil {
		t.Fatal(err)
	}
	var vectors []lmcacheVector
	if err := json.Unmarshal(b, &vectors); err != nil {
		t.Fatal(err)
	}
	var m LMCacheRequest // one for all: nothing of an earlier request may shine through
	for _, v := range vectors {
		t.Run(v.Name, func(t *testing.T) {
			in := frames(t, v.Frames)
			err := m.Decode(in, &DefaultLimits)
			if !v.Valid {
				if !errors.Is(err, ErrMalformed) {
					t.Fatalf("not refused as malformed: %v, %+v", err, m)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			got := lmcacheRequest{
				Cleanup: m.Cleanup, ID: string(m.ID), Hashes: []string{},
				DigestBytes: m.DigestBytes,
				Offsets:     append([]uint32{}, m.Offsets...), Tagged: m.Tagged,
			}
			for i := 0; i < len(m.Hashes); i += m.DigestBytes {
				got.Hashes = append(got.Hashes, hex.EncodeToString(m.Hashes[i:i+m.DigestBytes]))
			}
			a, _ := json.Marshal(got)
			b, _ := json.Marshal(v.Request)
			if !bytes.Equal(a, b) {
				t.Fatalf("decoded %s, want %s", a, b)
			}
			if m.Multipart != (len(in) == MaxLMCacheFrames) {
				t.Fatal("wrong form")
			}
			if m.Cleanup {
				return
			}
			answer := []string{hex.EncodeToString(AppendLMCacheResponse(nil, m.ID, answerTokens))}
			if m.Multipart {
				answer = []string{hex.EncodeToString(m.ID),
					hex.EncodeToString(AppendLMCacheTokens(nil, answerTokens))}
			}
			if strings.Join(answer, " ") != strings.Join(v.Answer, " ") {
				t.Fatalf("answer %v, want %v", answer, v.Answer)
			}
			for i, f := range in {
				if i == 0 && m.Multipart || i == 3 {
					continue // a shorter id or config is one too
				}
				for n := range f {
					cut := append([][]byte{}, in...)
					cut[i] = f[:n]
					if new(LMCacheRequest).Decode(cut, &DefaultLimits) == nil {
						t.Fatalf("accepted the first %d of %d bytes of frame %d", n, len(f), i)
					}
				}
			}
		})
	}
}

func TestLMCacheDoesNotAllocate(t *testing.T) {
	var m LMCacheRequest
	buf := make([]byte, 0, 1024)
	for _, v := range lmcacheVectors() {
		if !v.Valid {
			continue
		}
		in := frames(t, v.Frames)
		if err := m.Decode(in, &DefaultLimits); err != nil {
			t.Fatal(err)
		}
		n := testing.AllocsPerRun(100, func() {
			if m.Decode(in, &DefaultLimits) != nil {
				panic("refused")
			}
			buf = AppendLMCacheResponse(buf[:0], m.ID, 7)
		})
		if n != 0 {
			t.Errorf("%s: %v allocations", v.Name, n)
		}
	}
}

func FuzzLMCache(f *testing.F) {
	for _, v := range lmcacheVectors() {
		in := frames(f, v.Frames)
		for len(in) < 4 {
			in = append(in, nil)
		}
		f.Add(len(v.Frames) == 4, in[0], in[1], in[2], in[3])
	}
	f.Fuzz(func(t *testing.T, multi bool, a, b, c, d []byte) {
		in := [][]byte{a}
		if multi {
			in = [][]byte{a, b, c, d}
		}
		var m LMCacheRequest
		if m.Decode(in, &DefaultLimits) != nil {
			return
		}
		if len(m.ID) == 0 || len(m.ID) > DefaultLimits.LMCacheIDBytes {
			t.Fatalf("id of %d bytes", len(m.ID))
		}
		if m.DigestBytes < 0 || m.DigestBytes > MaxDigestBytes ||
			len(m.Hashes) != m.DigestBytes*len(m.Offsets) {
			t.Fatalf("%d bytes of hashes of %d, %d offsets", len(m.Hashes), m.DigestBytes,
				len(m.Offsets))
		}
		if m.Cleanup && len(m.Offsets) > 0 {
			t.Fatal("cleanup with offsets")
		}
		sum := uint64(0)
		for _, o := range m.Offsets {
			sum += uint64(o)
		}
		if sum > math.MaxUint32 {
			t.Fatal("offsets above 32 bits")
		}
		answer := AppendLMCacheResponse(nil, m.ID, uint32(sum))
		var back map[string]any
		if err := msgpack.Unmarshal(answer, &back); err != nil ||
			back["lookup_id"] != string(m.ID) {
			t.Fatalf("answer %x: %v", answer, err)
		}
		if binary.BigEndian.Uint32(AppendLMCacheTokens(nil, uint32(sum))) != uint32(sum) {
			t.Fatal("tokens")
		}
	})
}
