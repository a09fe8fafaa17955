package source

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestListWantsItsImages(t *testing.T) {
	for _, test := range []struct {
		name string
		in   []string
		want []string
	}{
		{"in the order given", []string{"b:1", "a:1"}, []string{"b:1", "a:1"}},
		{"without space around them", []string{" a:1", "b:1\n", "\tc:1\r\n"}, []string{"a:1", "b:1", "c:1"}},
		{"each once, at its first place", []string{"b:1", "a:1", " b:1"}, []string{"b:1", "a:1"}},
		{"and no empty one, as KIP_IMAGES='' gives", []string{""}, nil},
		{"and none of a stray comma", []string{"a:1", "", " "}, []string{"a:1"}},
		{"none when there are none", nil, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			var list Source = NewList("static", test.in)
			if list.Name() != "static" {
				t.Errorf("the name is %q", list.Name())
			}
			got, err := list.Images(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(Answer{Images: test.want}, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestListIsNotChangedThroughItsAnswer(t *testing.T) {
	list := NewList("cli", []string{"a:1"})
	first, _ := list.Images(t.Context())
	first.Images[0] = "changed"
	second, _ := list.Images(t.Context())
	if second.Images[0] != "a:1" {
		t.Error("the caller of Images wrote into the list")
	}
}
