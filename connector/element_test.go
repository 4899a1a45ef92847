package connector

import (
	"testing"

	"lookaside/ipc/wire"
)

func TestElement(t *testing.T) {
	for _, c := range []struct{ kv, model, encoding, want string }{
		{"auto", "bfloat16", "", "bfloat16"},
		{"auto", "torch.float16", "", "float16"},
		{"", "float32", "", "float32"},
		{"fp8_e4m3", "bfloat16", "", "float8"},
		{"fp8", "", "", "float8"},
		{"bfloat16", "float32", "", "bfloat16"},
		{"int4", "bfloat16", "", ""}, // not the model's
		{"auto", "complex64", "", ""},
		{"", "", "", ""},
		{"auto", "bfloat16", "int8 of bfloat16, version 1", "encoded"}, // no numbers to round again
	} {
		var fields []wire.Field
		if c.model != "" {
			fields = append(fields, wire.Field{Key: "dtype", Value: c.model})
		}
		if c.kv != "" {
			fields = append(fields, wire.Field{Key: "kv_dtype", Value: c.kv})
		}
		if c.encoding != "" {
			fields = append(fields, wire.Field{Key: "encoding", Value: c.encoding})
		}
		if got := elementOf(fields); got != c.want {
			t.Errorf("kv_dtype %q, dtype %q: %q, want %q", c.kv, c.model, got, c.want)
		}
	}
}
