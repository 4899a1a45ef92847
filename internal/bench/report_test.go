package bench

import (
	"encoding/json"
	"io"
	"path/filepath"
	"testing"
)

// TestRounds has the numbers of test_bench.py.
func TestRounds(t *testing.T) {
	r := NewReport("x")
	// 1, 3, 1.2, 1.6, 1.5
	r.Rounds("five", "us", []float64{10, 30, 24, 8, 60}, []float64{10, 10, 20, 5, 40})
	r.Rounds("one", "us", []float64{123456.7}, []float64{1000})
	got, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	want := `{"benchmark":"x","cases":[{"name":"five","value":24,"unit":"us","limit":10,"ratio":2.4,"spread":0.4},` +
		`{"name":"one","value":123460,"unit":"us","limit":1000,"ratio":123.46,"spread":0}]}`
	if string(got) != want {
		t.Errorf("%s, not %s", got, want)
	}
	file := filepath.Join(t.TempDir(), "none", "x.json")
	if err := r.Print(io.Discard, io.Discard, file); err == nil {
		t.Error("a file where none can be was no error")
	}
}
