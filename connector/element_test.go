package connector

import (
	"testing"

	"lookaside/ipc/wire"
)

func TestElement(t *testing.T) {
	for _, c := range []struct{ kv, model, want string }{
		{"auto", "bfloat16", "bfloat16"},
		{"auto", "torch.float16", "float16"},
		{"", "float32", "float32"},
		{"fp8_e4m3", "bfloat16", "float8"},
		{"fp8", "", "float8"},
		{"bfloat16", "float32", "bfloat16"},
		{"int4", "bfloat16", ""}, // not the model's
		{"auto", "complex64", ""},
		{"", "", ""},
	} {
		var fields []wire.Field
		if c.model != "" {
			fields = append(fields, wire.Field{Key: "dtype", Value: c.model})
		}
		if c.kv != "" {
			fields = append(fields, wire.Field{Key: "kv_dtype", Value: c.kv})
		}
		if got := elementOf(fields); got != c.want {
			t.Errorf("kv_dtype %q, dtype %q: %q, want %q", c.kv, c.model, got, c.want)
		}
	}
}
