package handover

import (
	"bytes"
	"errors"
	"math"
	"reflect"
	"testing"
)

type everything struct {
	a    uint64
	b    uint32
	c    int64
	d    int
	e    bool
	text string
	raw  []byte
	list []inner
}

type inner struct {
	n    uint32
	more []uint64
}

func (m *everything) fields(c *Coder) {
	c.Uint64(&m.a)
	c.Uint32(&m.b)
	c.Int64(&m.c)
	c.Int(&m.d, 1000)
	c.Bool(&m.e)
	c.Text(&m.text, 10)
	c.Bytes(&m.raw, 100)
	List(c, &m.list, 50, func(v *inner) {
		c.Uint32(&v.n)
		List(c, &v.more, 50, c.Uint64)
	})
}

var whole = everything{
	a: math.MaxUint64, b: math.MaxUint32, c: math.MaxInt64, d: 1000, e: true,
	text: "0123456789", raw: bytes.Repeat([]byte{7}, 100),
	list: []inner{{n: 1, more: []uint64{2, 3}}, {n: 4, more: []uint64{}}},
}

func TestRoundTrip(t *testing.T) {
	b := Encode(whole.fields)
	var got everything
	if err := Decode(b, got.fields); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got, whole) {
		t.Errorf("%+v became %+v", whole, got)
	}
	long := everything{text: "longer than ten bytes"}
	if err := Decode(Encode(long.fields), got.fields); err != nil || got.text != "longer tha" {
		t.Errorf("a text that is too long became %q: %v", got.text, err)
	}
}

func TestEveryCutIsRefused(t *testing.T) {
	b := Encode(whole.fields)
	for n := range b {
		var got everything
		if err := Decode(b[:n], got.fields); !errors.Is(err, ErrMalformed) {
			t.Errorf("the first %d bytes: %v", n, err)
		}
	}
	if err := Decode(append(b, 0), new(everything).fields); !errors.Is(err, ErrMalformed) {
		t.Errorf("with a byte more: %v", err)
	}
}

func TestLimits(t *testing.T) {
	for name, bad := range map[string]everything{
		"number": {d: 1001},
		"bytes":  {raw: make([]byte, 101)},
		"list":   {list: make([]inner, 51)},
	} {
		err := Decode(Encode(bad.fields), new(everything).fields)
		if !errors.Is(err, ErrMalformed) {
			t.Errorf("%s beyond its limit: %v", name, err)
		}
	}
}

// What decodes is encoded to the same again, and nothing of a few bytes takes much memory.
func FuzzDecode(f *testing.F) {
	f.Add(Encode(whole.fields))
	begin := Begin{Handover: 1, Protocol: 10, Release: "x", LimitBytes: 1 << 40, Lossy: "fp8"}
	f.Add(Encode(begin.Fields))
	memory := Memory{Generation: 5, Pins: []byte("[]")}
	f.Add(Encode(memory.Fields))
	f.Fuzz(func(t *testing.T, b []byte) {
		var m everything
		if err := Decode(b, m.fields); err == nil {
			var again everything
			if err := Decode(Encode(m.fields), again.fields); err != nil ||
				!reflect.DeepEqual(m, again) {
				t.Errorf("%+v became %+v: %v", m, again, err)
			}
		}
		var begin Begin
		_ = Decode(b, begin.Fields)
		var refuse Refuse
		_ = Decode(b, refuse.Fields)
		var memory Memory
		_ = Decode(b, memory.Fields)
	})
}
